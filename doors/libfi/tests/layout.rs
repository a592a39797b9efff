//! The types of `abi.rs` have the layout of libfabric's headers.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use weft_fi_provider::abi;

const HEADER: &str = "/usr/include/rdma/providers/fi_prov.h";

/// C's name, C's field, our offset; without a field, our size.
fn expected() -> Vec<(&'static str, &'static str, usize)> {
    macro_rules! table {
        ($($c:literal as $rust:ident { $($field:literal = $ours:ident),* })*) => {
            vec![$(($c, "", size_of::<abi::$rust>()), $(($c, $field, offset_of!(abi::$rust, $ours)),)*)*]
        };
    }
    table! {
        "fid" as Fid { "fclass" = fclass, "context" = context, "ops" = ops }
        "fi_ops" as Ops { "close" = close, "bind" = bind, "control" = control, "ops_open" = missing }
        "fi_tx_attr" as TxAttr { "op_flags" = op_flags, "inject_size" = inject_size, "iov_limit" = iov_limit, "tclass" = tclass }
        "fi_rx_attr" as RxAttr { "op_flags" = op_flags, "total_buffered_recv" = total_buffered_recv, "iov_limit" = iov_limit }
        "fi_ep_attr" as EpAttr {
            "type" = kind, "max_msg_size" = max_msg_size, "mem_tag_format" = mem_tag_format, "tx_ctx_cnt" = tx_ctx_cnt, "auth_key" = auth_key
        }
        "fi_domain_attr" as DomainAttr {
            "name" = name, "threading" = threading, "data_progress" = data_progress, "av_type" = av_type, "mr_mode" = mr_mode,
            "cq_data_size" = cq_data_size, "max_ep_tx_ctx" = max_ep_tx_ctx, "caps" = caps, "auth_key" = auth_key, "tclass" = tclass
        }
        "fi_fabric_attr" as FabricAttr { "name" = name, "prov_name" = prov_name, "api_version" = api_version }
        "fi_info" as Info {
            "caps" = caps, "addr_format" = addr_format, "src_addrlen" = src_addrlen, "src_addr" = src_addr, "dest_addr" = dest_addr,
            "tx_attr" = tx_attr, "ep_attr" = ep_attr, "fabric_attr" = fabric_attr, "nic" = nic
        }
        "fi_provider" as Provider { "fi_version" = fi_version, "context" = context, "name" = name, "getinfo" = getinfo, "fabric" = fabric, "cleanup" = cleanup }
        "fid_fabric" as FabricFid { "ops" = ops, "api_version" = api_version }
        "fi_ops_fabric" as FabricOps { "domain" = domain, "passive_ep" = passive_ep, "eq_open" = eq_open, "wait_open" = wait_open, "trywait" = trywait, "domain2" = domain2 }
        "fid_eq" as EqFid { "ops" = ops }
        "fi_ops_eq" as EqOps { "read" = read, "readerr" = readerr, "sread" = sread, "strerror" = strerror }
        "fid_domain" as DomainFid { "ops" = ops, "mr" = mr }
        "fi_ops_domain" as DomainOps { "av_open" = av_open, "cq_open" = cq_open, "endpoint" = endpoint, "scalable_ep" = scalable_ep, "cntr_open" = cntr_open, "poll_open" = missing }
        "fi_ops_mr" as MrOps { "reg" = missing }
        "fid_av" as AvFid { "ops" = ops }
        "fi_ops_av" as AvOps { "insert" = insert, "remove" = remove, "lookup" = lookup, "straddr" = straddr, "av_set" = av_set }
        "fi_cq_attr" as CqAttr { "format" = format, "wait_obj" = wait_obj, "wait_set" = wait_set }
        "fid_cq" as CqFid { "ops" = ops }
        "fi_ops_cq" as CqOps { "read" = read, "readfrom" = readfrom, "readerr" = readerr, "sread" = sread, "sreadfrom" = sreadfrom, "strerror" = strerror }
        "fid_cntr" as CntrFid { "ops" = ops }
        "fi_ops_cntr" as CntrOps { "read" = read, "readerr" = readerr, "add" = add, "set" = set, "wait" = wait, "adderr" = adderr, "seterr" = seterr }
        "fi_cq_tagged_entry" as CqEntry { "op_context" = op_context, "flags" = flags, "len" = len, "buf" = buf, "data" = data, "tag" = tag }
        "fi_cq_err_entry" as CqErrEntry { "olen" = olen, "err" = err, "prov_errno" = prov_errno, "err_data_size" = err_data_size }
        "fid_ep" as EpFid { "ops" = ops, "cm" = cm, "msg" = msg, "rma" = rma, "tagged" = tagged, "collective" = collective }
        "fi_ops_ep" as EpOps { "cancel" = cancel, "getopt" = getopt, "setopt" = setopt, "tx_ctx" = missing }
        "fi_ops_cm" as CmOps { "setname" = setname, "getname" = getname, "getpeer" = missing }
        "fi_msg" as Msg { "msg_iov" = iov, "iov_count" = iov_count, "addr" = addr, "context" = context, "data" = data }
        "fi_msg_tagged" as MsgTagged { "addr" = addr, "tag" = tag, "ignore" = ignore, "context" = context, "data" = data }
        "fi_ops_msg" as MsgOps { "recv" = recv, "recvmsg" = recvmsg, "send" = send, "sendmsg" = sendmsg, "inject" = inject, "injectdata" = injectdata }
        "fi_ops_tagged" as TaggedOps { "recv" = recv, "recvmsg" = recvmsg, "send" = send, "inject" = inject, "injectdata" = injectdata }
    }
}

/// Numbers of the headers that ours repeat.
fn numbers() -> Vec<(&'static str, u64)> {
    macro_rules! table {
        ($($name:ident)*) => { vec![$((stringify!($name), abi::$name as u64)),*] };
    }
    table! {
        FI_MSG FI_TAGGED FI_RECV FI_SEND FI_MULTI_RECV FI_REMOTE_CQ_DATA FI_PEEK FI_COMPLETION FI_INJECT FI_INJECT_COMPLETE FI_TRANSMIT_COMPLETE FI_DELIVERY_COMPLETE
        FI_MATCH_COMPLETE FI_LOCAL_COMM FI_REMOTE_COMM FI_SOURCE FI_DISCARD FI_CLAIM FI_DIRECTED_RECV FI_SELECTIVE_COMPLETION FI_ORDER_SAS FI_ADDR_UNSPEC
        FI_EP_RDM FI_AV_TABLE FI_THREAD_SAFE FI_PROGRESS_MANUAL FI_RM_ENABLED FI_CLASS_FABRIC FI_CLASS_DOMAIN FI_CLASS_EP FI_CLASS_AV FI_CLASS_EQ FI_CLASS_CQ FI_CLASS_CNTR FI_WAIT_FD FI_GETWAIT FI_GETWAITOBJ
        FI_OPT_ENDPOINT FI_OPT_MIN_MULTI_RECV FI_ENABLE FI_GETOPSFLAG FI_SETOPSFLAG FI_CQ_FORMAT_CONTEXT FI_CQ_FORMAT_MSG FI_CQ_FORMAT_DATA FI_CQ_FORMAT_TAGGED FI_WAIT_UNSPEC FI_ETOOSMALL FI_EAVAIL
        FI_ETRUNC
    }
}

#[test]
fn types_and_numbers_are_as_in_the_headers() {
    if !Path::new(HEADER).exists() {
        println!("skipped: {HEADER} is missing (apt-get install libfabric-dev)");
        return;
    }
    let mut text = String::from(
        "#include <stdio.h>\n#include <rdma/providers/fi_prov.h>\n#include <rdma/fi_cm.h>\n#include <rdma/fi_domain.h>\n\
         #include <rdma/fi_endpoint.h>\n#include <rdma/fi_eq.h>\n#include <rdma/fi_tagged.h>\nint main(void) {\n",
    );
    let (layout, numbers) = (expected(), numbers());
    for (name, field, _) in &layout {
        let value = if field.is_empty() {
            format!("sizeof(struct {name})")
        } else {
            format!("offsetof(struct {name}, {field})")
        };
        let _ = writeln!(text, "printf(\"%llu\\n\", (unsigned long long)({value}));");
    }
    for (name, _) in &numbers {
        let _ = writeln!(text, "printf(\"%llu\\n\", (unsigned long long)({name}));");
    }
    text.push_str("return 0; }\n");
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("layout.c"), dir.path().join("layout"));
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    let built = cc.arg("-o").args([&program, &source]).status().expect("cc");
    assert!(built.success(), "cc");
    let said = Command::new(&program).output().unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    let mut theirs = said.lines().map(|line| line.parse::<u64>().unwrap());
    for (name, field, ours) in layout {
        assert_eq!(Some(ours as u64), theirs.next(), "{name} {field}");
    }
    for (name, ours) in numbers {
        assert_eq!(Some(ours), theirs.next(), "{name}");
    }
}
