//! Shells and neighbours that lie about loaded tables: nothing of that stays, and no worker ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::ipc::writer::StreamWriter;
use weft_join::exec::Query;
use weft_join::rule::RowsAt;
use weft_join::session::context;
use weft_join::shell::ask;
use weft_join::sql::register;
use weft_join::talk::{
    Ask, ELEMENT, GO_ON, Load, Loaded, ORDER, OUTCOME, Order, Outcome, REPORTED, Table, VERSION,
    What,
};
use weft_roundabout::{Next, Own, Ring, RingListener, Security, VISIT};

use crate::bad::told_with;
use crate::help::{Workers, rows};
use crate::loaded::{held, load, nothing_is_left};

fn listener() -> RingListener {
    RingListener::open("127.0.0.1:0".parse().unwrap(), Security::SameUser, None).unwrap()
}

/// Sends one message, and returns the worker's outcome, or why there is none. Each report is followed by one of these words.
fn visit(worker: SocketAddr, word: u64, text: &[u8], then: &[u64]) -> String {
    let listener = listener();
    let ring = Ring {
        exchange: VISIT,
        element: ELEMENT,
        elements: 4,
        ..Ring::new(random(), vec![listener.local_addr(), worker], 0)
    };
    let mut node = listener.join(&ring).unwrap();
    let mut sent = vec![(text.to_vec(), word)];
    let (mut own, mut outcome, mut then) = (Own::Now, None, then.iter());
    loop {
        match node.next_with(own) {
            Ok(Next::Room(mut room)) => {
                let (text, word) = sent.pop().unwrap();
                room.write(0, &text).unwrap();
                drop(room.commit(text.len(), 0, [word, 0, 0, 0]).unwrap());
                own = Own::Later;
            }
            Ok(Next::Element(element)) if element.origin() == 1 => match element.user()[0] {
                REPORTED => match then.next() {
                    Some(&word) => {
                        sent.push((Vec::new(), word));
                        own = Own::Now;
                    }
                    None => {
                        node.give_up("the shell is not interested");
                        return "left".into();
                    }
                },
                OUTCOME => {
                    let mut text = vec![0; element.len()];
                    element.read(0, &mut text).unwrap();
                    let said: Outcome = serde_json::from_slice(&text).unwrap();
                    outcome = Some(said.error.unwrap_or_else(|| "done".into()));
                    own = Own::Never;
                }
                _ => {}
            },
            Ok(Next::End) => return outcome.unwrap(),
            Ok(_) => {}
            Err(error) => return error.to_string(),
        }
    }
}

fn random() -> [u8; 16] {
    let mut id = [0; 16];
    getrandom::fill(&mut id).unwrap();
    id
}

fn table(folder: &std::path::Path) -> Table {
    let path = folder.join("t.csv");
    let text: String = (0..100).map(|n| format!("{n},{}\n", n % 7)).collect();
    std::fs::write(&path, format!("id,k\n{text}")).unwrap();
    Table {
        name: "t".into(),
        file: path.to_str().unwrap().into(),
    }
}

fn json(what: What) -> Vec<u8> {
    let version = VERSION;
    serde_json::to_vec(&Order { version, what }).unwrap()
}

#[test]
fn orders_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let table = table(folder.path());
    let workers = Workers::start(1);
    let worker = workers.addresses[0];
    for text in [
        "",
        "{}",
        "\u{0}",
        &"[".repeat(100_000),
        r#"{"version":3,"what":"Fly"}"#,
    ] {
        let why = told_with(text.as_bytes(), ORDER);
        assert!(why.contains("gave up: "), "{why}");
    }
    let other = br#"{"version":4,"what":{"Sort":[]}}"#;
    let why = visit(worker, ORDER, other, &[GO_ON; 2]);
    assert!(
        why.contains("the shell speaks version 4, this worker 3"),
        "{why}"
    );
    let load = Load {
        id: random(),
        nodes: vec![worker],
        me: 0,
        element: 4096,
        table,
        by: None,
    };
    let wrong = |change: &dyn Fn(&mut Load)| {
        let mut load = load.clone();
        change(&mut load);
        visit(worker, ORDER, &json(What::Load(load)), &[GO_ON; 2])
    };
    for (why, part) in [
        (wrong(&|load| load.me = 1), "settings"),
        (wrong(&|load| load.nodes.clear()), "settings"),
        (wrong(&|load| load.nodes = vec![worker; 2000]), "settings"),
        (wrong(&|load| load.element = 3), "settings"),
        (wrong(&|load| load.element = usize::MAX & !7), "settings"),
        (wrong(&|load| load.table.name = "../t".into()), "name"),
        (wrong(&|load| load.table.name = "T".into()), "capitals"),
        (wrong(&|load| load.table.file = String::new()), "table t"),
        (wrong(&|load| load.by = Some("no".into())), "no column no"),
    ] {
        assert!(why.contains(part), "{part}: {why}");
    }
    // Each byte is damaged in turn; most of that is no JSON, and some is another order.
    let whole = json(What::Load(load.clone()));
    for at in (0..whole.len()).step_by(5) {
        let mut text = whole.clone();
        text[at] ^= 1 << (at % 7);
        let why = visit(worker, ORDER, &text, &[GO_ON]);
        // A thread that panics gives no reason.
        assert!(!why.ends_with("gave up"), "{at}: {why}");
    }
    nothing_is_left(&[worker]);
    assert_eq!(wrong(&|load| load.id = random()), "done");
    assert_eq!(held(&[worker])[0].0, ["t"]);
}

#[test]
fn a_question_about_a_part_that_is_not_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let table = table(folder.path());
    let workers = Workers::start(1);
    let worker = workers.addresses[0];
    let parts = load(&workers.addresses, &table, Some("id"));
    let about = Loaded {
        name: "t".into(),
        load: parts[0].load,
        layout: vec![Some(0)],
        by: Some("id".into()),
        rows: 100,
        schema: None,
    };
    let asked = |nodes: Vec<SocketAddr>, me: usize, about: Loaded| {
        let ask = Ask {
            version: VERSION,
            id: random(),
            nodes,
            me,
            element: 4096,
            sql: "SELECT count(*) FROM t".into(),
            tables: Vec::new(),
            loaded: vec![about],
        };
        visit(worker, 0, &serde_json::to_vec(&ask).unwrap(), &[GO_ON; 2])
    };
    let one = |change: &dyn Fn(&mut Loaded)| {
        let mut about = about.clone();
        change(&mut about);
        asked(vec![worker], 0, about)
    };
    assert_eq!(one(&|_| ()), "done");
    for (why, part) in [
        (one(&|t| t.load = random()), "has not the part"),
        (one(&|t| t.by = None), "has not the part"),
        (one(&|t| t.name = "u".into()), "has not the part"),
        (one(&|t| t.layout = vec![None]), "layout"),
        (one(&|t| t.layout = vec![]), "layout"),
        (one(&|t| t.layout = vec![Some(1)]), "layout"),
        (one(&|t| t.layout = vec![Some(u32::MAX)]), "layout"),
        (one(&|t| t.layout = vec![Some(0), Some(1)]), "layout"),
        (one(&|t| t.layout = vec![Some(0); 70_000]), "layout"),
    ] {
        assert!(why.contains(part), "{why}");
    }
    // For a worker without a part the shell has the schema.
    let nodes = vec!["127.0.0.1:1".parse().unwrap(), worker];
    for schema in [
        None,
        Some(""),
        Some("0"),
        Some("zz"),
        Some("ff".repeat(1000).as_str()),
    ] {
        let about = Loaded {
            layout: vec![Some(0), None],
            schema: schema.map(Into::into),
            ..about.clone()
        };
        let why = asked(nodes.clone(), 1, about);
        assert!(
            why.contains("schema") || why.contains("rror"),
            "{schema:?}: {why}"
        );
    }
    let answer = ask(&workers.question(&[], "SELECT count(*) FROM t"), |_| ()).unwrap();
    assert_eq!(rows(&answer.batches), ["100"]);
}

/// What a neighbour gives to the ring of a load.
type Element = (Vec<u8>, u8, u64);

/// A load by a worker and a node that gives these elements. Returns the worker's outcome.
fn beside(
    worker: SocketAddr,
    table: &Table,
    elements: &[Element],
    leaves: bool,
    keep: &[u64],
) -> String {
    const ELEMENT: usize = 65_536;
    let listener = Arc::new(listener());
    let id = random();
    let nodes = vec![listener.local_addr(), worker];
    let mut ring = Ring {
        element: ELEMENT,
        ..Ring::new(id, nodes.clone(), 0)
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let query = Arc::new(Query::new(Arc::clone(&listener), ring.clone()));
    runtime.block_on(async {
        let context = context(&query, None, RowsAt::Each).unwrap();
        register(&context, table, None, nodes.len()).await.unwrap();
        let frame = context.table(&table.name).await.unwrap();
        frame.create_physical_plan().await.unwrap();
    });
    ring.agreement = query.agreement.load(std::sync::atomic::Ordering::SeqCst);
    let order = json(What::Load(Load {
        id,
        nodes,
        me: 1,
        element: ELEMENT,
        table: table.clone(),
        by: Some("id".into()),
    }));
    thread::scope(|scope| {
        let shell = scope.spawn(|| visit(worker, ORDER, &order, keep));
        let mut node = listener.join(&ring).unwrap();
        let mut elements = elements.iter();
        let mut next = elements.next();
        loop {
            let own = if next.is_some() { Own::Now } else { Own::Never };
            if leaves && next.is_none() {
                node.give_up("it has enough");
                break;
            }
            match node.next_with(own) {
                Ok(Next::Room(mut room)) => {
                    let (bytes, flags, part) = next.unwrap();
                    room.write(0, bytes).unwrap();
                    drop(room.commit(bytes.len(), *flags, [*part, 0, 0, 0]).unwrap());
                    next = elements.next();
                }
                Ok(Next::End) => {
                    let _ = node.finish();
                    break;
                }
                Ok(_) => {}
                Err(_) => break,
            }
        }
        shell.join().unwrap()
    })
}

fn encoded(columns: &[(&str, ArrayRef)]) -> Vec<u8> {
    let batch = RecordBatch::try_from_iter(columns.to_vec()).unwrap();
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn a_neighbour_that_lies_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let table = table(folder.path());
    let workers = Workers::with_tables(&[4 << 20]);
    let worker = workers.addresses[0];
    let numbers = |numbers: std::ops::Range<i64>| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(numbers))
    };
    let good = encoded(&[("id", numbers(0..50)), ("k", numbers(0..50))]);
    let text: ArrayRef = Arc::new(StringArray::from_iter_values(["a", "b"]));
    let typed = encoded(&[("id", numbers(0..2)), ("k", text)]);
    let narrow = encoded(&[("id", numbers(0..2))]);
    let mut damaged = good.clone();
    let middle = damaged.len() / 2;
    damaged[20..middle].fill(0xff);
    let endless = vec![(vec![7; 65_536], 1, 1); 100];
    let lie = |elements: &[Element], part: &str| {
        let why = beside(worker, &table, elements, false, &[GO_ON; 2]);
        assert!(
            why.contains(part) && !why.contains("panicked"),
            "{part}: {why}"
        );
        nothing_is_left(&[worker]);
    };
    lie(&[(good.clone(), 0, 1)], "rows of another part");
    lie(&[(typed, 0, 1)], "another type");
    lie(&[(narrow, 0, 1)], "another type");
    lie(&[(damaged, 0, 1)], "table t");
    lie(&[(good[..good.len() / 2].to_vec(), 0, 1)], "table t");
    lie(&[(vec![9; 100], 0, 1)], "table t");
    lie(&endless, "it does not fit");
    // It leaves in the middle.
    let why = beside(worker, &table, &[], true, &[GO_ON; 2]);
    assert!(
        why.contains("node 0") && why.contains("it has enough"),
        "{why}"
    );
    nothing_is_left(&[worker]);
    // The shell leaves before the end, or says something else.
    assert_eq!(beside(worker, &table, &[], false, &[GO_ON]), "left");
    nothing_is_left(&[worker]);
    // Rows for nobody, and nothing.
    let others = [(good.clone(), 0, 7), (good, 0, u64::MAX)];
    assert_eq!(beside(worker, &table, &others, false, &[GO_ON; 2]), "done");
    assert_eq!(held(&[worker])[0].0, ["t"]);
}
