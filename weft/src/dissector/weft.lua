-- A dissector for the formats of weft that Wireshark does not know. Made by `weft dissector`.
--
--   tshark -X lua_script:weft.lua -r capture.pcap
--   or copy it into the plugin folder that Wireshark names in Help, About, Folders.
--
-- It knows: datagrams of versions 1 and 2 with RDMA Write-Record and control datagrams, and the requests and replies for a
-- datagram queue pair (docs/spec/dgram.md). Any UDP port: it looks at the bytes.
--
-- Inside iWARP over TCP, which Wireshark's own dissectors take apart (tshark -o tcp.try_heuristic_first:TRUE), it knows the greetings and
-- messages of EXS (docs/spec/exs.md) and SDP (docs/spec/sdp.md). The capture has to have the connection's start-up: the greetings say
-- which of the two it is.

local bxor, band, rshift
local library = bit or bit32
if library then
  bxor, band, rshift = library.bxor, library.band, library.rshift
else
  -- Lua 5.3 and later have operators, which earlier ones cannot read.
  bxor = load("return function(a, b) return a ~ b end")()
  band = load("return function(a, b) return a & b end")()
  rshift = load("return function(a, n) return a >> n end")()
end

local crc_table = {}
for i = 0, 255 do
  local c = i
  for _ = 1, 8 do
    if band(c, 1) == 1 then
      c = bxor(rshift(c, 1), 0x82f63b78)
    else
      c = rshift(c, 1)
    end
  end
  crc_table[i] = c
end

-- CRC-32C of the first `len` bytes.
local function crc32c(bytes, len)
  local c = 0xffffffff
  for i = 0, len - 1 do
    c = bxor(rshift(c, 8), crc_table[band(bxor(c, bytes:get_index(i)), 0xff)])
  end
  c = bxor(c, 0xffffffff)
  -- BitOp's numbers have a sign.
  return c % 0x100000000
end

local weft = Proto("weft", "weft datagram (iWARP over UDP)")

local kinds = { [0x28] = "probe", [0x29] = "report", [0x2a] = "ack", [0x2b] = "fault", [0x2c] = "hello", [0x2d] = "welcome" }
local faults = { [1] = "not ready", [2] = "too long", [3] = "access", [4] = "operation", [5] = "unknown flow" }
local opcodes = { [0] = "RDMA Write-Record", [3] = "Send", [5] = "Send with SE", [8] = "Immediate", [9] = "Immediate with SE" }
local sidr_kinds = { [1] = "request", [2] = "reply" }
local sidr_status = { [0] = "here", [1] = "nobody listens", [2] = "rejected", [3] = "dropped" }

local f = {
  version = ProtoField.uint8("weft.version", "Version", base.DEC),
  immediate_flag = ProtoField.bool("weft.flags.immediate", "Immediate data", 8, nil, 0x01),
  solicited_flag = ProtoField.bool("weft.flags.solicited", "Solicited event", 8, nil, 0x02),
  reliable_flag = ProtoField.bool("weft.flags.reliable", "Reliable", 8, nil, 0x04),
  dst_qp = ProtoField.uint32("weft.dst_qp", "Destination queue pair", base.HEX),
  src_qp = ProtoField.uint32("weft.src_qp", "Source queue pair", base.HEX),
  qkey = ProtoField.uint32("weft.qkey", "Q_Key", base.HEX),
  incarnation = ProtoField.uint32("weft.incarnation", "Incarnation", base.HEX),
  length = ProtoField.uint32("weft.length", "Message length", base.DEC),
  tagged = ProtoField.bool("weft.ddp.tagged", "Tagged", 8, nil, 0x80),
  last = ProtoField.bool("weft.ddp.last", "Last segment", 8, nil, 0x40),
  opcode = ProtoField.uint8("weft.opcode", "Opcode", base.DEC, opcodes, 0x0f),
  queue = ProtoField.uint32("weft.queue", "Queue number", base.DEC),
  msn = ProtoField.uint32("weft.msn", "Message sequence number", base.DEC),
  offset = ProtoField.uint32("weft.offset", "Message offset", base.DEC),
  stag = ProtoField.uint32("weft.stag", "STag", base.HEX),
  to = ProtoField.uint64("weft.to", "Tagged offset", base.HEX),
  imm = ProtoField.uint64("weft.imm", "Immediate data", base.HEX),
  payload = ProtoField.bytes("weft.payload", "Payload"),
  crc = ProtoField.uint32("weft.crc", "CRC-32C", base.HEX),
  crc_good = ProtoField.bool("weft.crc.good", "CRC-32C is right"),
  control = ProtoField.uint8("weft.control", "Control", base.HEX, kinds),
  fault = ProtoField.uint8("weft.fault", "Fault", base.DEC, faults),
  cookie = ProtoField.uint32("weft.cookie", "Cookie", base.HEX),
  psn = ProtoField.uint32("weft.psn", "Packet sequence number", base.DEC),
  sack = ProtoField.uint64("weft.sack", "Packets behind it that have come", base.HEX),
  flow_cookie = ProtoField.uint64("weft.flow_cookie", "Cookie of the flow", base.HEX),
  sent = ProtoField.uint64("weft.sent", "Sent", base.DEC),
  room = ProtoField.uint32("weft.room", "Receive buffer", base.DEC),
  sidr = ProtoField.uint8("weft.sidr", "Service resolution", base.DEC, sidr_kinds),
  sidr_status = ProtoField.uint8("weft.sidr.status", "Status", base.DEC, sidr_status),
  sidr_transaction = ProtoField.uint64("weft.sidr.transaction", "Transaction", base.HEX),
  sidr_data = ProtoField.bytes("weft.sidr.data", "Private data"),
}
weft.fields = f

local bad_crc = ProtoExpert.new("weft.crc.bad", "The CRC is wrong: the receiver drops this", expert.group.CHECKSUM, expert.severity.ERROR)
local malformed = ProtoExpert.new("weft.malformed", "Shorter than its headers", expert.group.MALFORMED, expert.severity.ERROR)
weft.experts = { bad_crc, malformed }

-- The CRC is little-endian, as in an FPDU (RFC 5044).
local function add_crc(tvb, tree)
  local at = tvb:len() - 4
  local said = tvb(at, 4):le_uint()
  local item = tree:add_le(f.crc, tvb(at, 4))
  local good = crc32c(tvb:bytes(), at) == said
  tree:add(f.crc_good, tvb(at, 4), good):set_generated()
  if not good then
    item:add_proto_expert_info(bad_crc)
  end
end

local function add_payload(tvb, tree, at)
  local len = tvb:len() - 4 - at
  if len > 0 then
    tree:add(f.payload, tvb(at, len))
  end
  return len
end

-- The DDP header at `at` (RFC 5041 4.2, 4.3), and what version 2 has behind a tagged one. Returns where it ends, the opcode, the
-- message sequence number and the offset; nothing if it does not end.
local function add_ddp(tvb, tree, at)
  local tagged = band(tvb(at, 1):uint(), 0x80) ~= 0
  local need = tagged and 22 or 18
  if tvb:len() < at + need + 4 then
    tree:add_proto_expert_info(malformed)
    return nil
  end
  tree:add(f.tagged, tvb(at, 1))
  tree:add(f.last, tvb(at, 1))
  tree:add(f.opcode, tvb(at + 1, 1))
  local opcode = band(tvb(at + 1, 1):uint(), 0x0f)
  local place = at + 14
  if tagged then
    tree:add(f.stag, tvb(at + 2, 4))
    tree:add(f.to, tvb(at + 6, 8))
  else
    tree:add(f.queue, tvb(at + 6, 4))
    place = at + 10
  end
  tree:add(f.msn, tvb(place, 4))
  tree:add(f.offset, tvb(place + 4, 4))
  return at + need, opcode, tvb(place, 4):uint(), tvb(place + 4, 4):uint()
end

local function add_imm(tvb, tree, at)
  if tvb:len() < at + 12 then
    tree:add_proto_expert_info(malformed)
    return at
  end
  tree:add(f.imm, tvb(at, 8))
  return at + 8
end

local function name(opcode)
  return opcodes[opcode] or ("opcode " .. opcode)
end

local function version1(tvb, pinfo, tree)
  tree:add(f.dst_qp, tvb(2, 4))
  tree:add(f.src_qp, tvb(6, 4))
  tree:add(f.qkey, tvb(10, 4))
  local at, opcode, msn = add_ddp(tvb, tree, 14)
  if at == nil then
    return
  end
  if opcode == 8 or opcode == 9 then
    at = add_imm(tvb, tree, at)
  end
  local len = add_payload(tvb, tree, at)
  pinfo.cols.info = string.format("%s, msn %d, %d bytes", name(opcode), msn, len)
end

local function version2(tvb, pinfo, tree)
  if tvb:len() < 44 then
    tree:add_proto_expert_info(malformed)
    return
  end
  local flags = tvb(1, 1):uint()
  tree:add(f.immediate_flag, tvb(1, 1))
  tree:add(f.solicited_flag, tvb(1, 1))
  tree:add(f.reliable_flag, tvb(1, 1))
  tree:add(f.dst_qp, tvb(2, 4))
  tree:add(f.src_qp, tvb(6, 4))
  tree:add(f.qkey, tvb(10, 4))
  tree:add(f.incarnation, tvb(14, 4))
  tree:add(f.length, tvb(18, 4))
  local start = 22
  if band(flags, 4) ~= 0 then
    if tvb:len() < 56 then
      tree:add_proto_expert_info(malformed)
      return
    end
    tree:add(f.psn, tvb(22, 4))
    tree:add(f.flow_cookie, tvb(26, 8))
    start = 34
  end
  local at, opcode, msn, offset = add_ddp(tvb, tree, start)
  if at == nil then
    return
  end
  if band(flags, 1) ~= 0 then
    at = add_imm(tvb, tree, at)
  end
  local len = add_payload(tvb, tree, at)
  pinfo.cols.info = string.format("%s, msn %d, bytes %d to %d of %d", name(opcode), msn, offset, offset + len, tvb(18, 4):uint())
end

local function control(tvb, pinfo, tree)
  local kind = tvb(1, 1):uint()
  tree:add(f.control, tvb(1, 1))
  pinfo.cols.info = kinds[kind] or "control"
  if kind <= 0x29 and tvb:len() == 24 then
    tree:add(f.cookie, tvb(4, 4))
    tree:add(f.sent, tvb(8, 8))
    if kind == 0x29 then
      tree:add(f.room, tvb(16, 4))
    end
  elseif kind >= 0x2a and tvb:len() == 32 then
    tree:add(f.dst_qp, tvb(4, 4))
    tree:add(f.src_qp, tvb(8, 4))
    tree:add(f.incarnation, tvb(12, 4))
    if kind == 0x2a then
      tree:add(f.psn, tvb(16, 4))
      tree:add(f.sack, tvb(20, 8))
      pinfo.cols.info = string.format("ack, psn %d", tvb(16, 4):uint())
    elseif kind == 0x2b then
      local code = tvb(2, 1):uint()
      tree:add(f.fault, tvb(2, 1))
      tree:add(f.psn, tvb(16, 4))
      tree:add(f.msn, tvb(20, 4))
      pinfo.cols.info = string.format("fault: %s, msn %d", faults[code] or code, tvb(20, 4):uint())
    elseif kind == 0x2c then
      tree:add(f.qkey, tvb(16, 4))
    else
      tree:add(f.flow_cookie, tvb(20, 8))
    end
  else
    tree:add_proto_expert_info(malformed)
  end
end

local function sidr(tvb, pinfo, tree)
  local kind = tvb(4, 1):uint()
  local len = tvb(7, 1):uint()
  tree:add(f.sidr, tvb(4, 1))
  tree:add(f.sidr_status, tvb(5, 1))
  tree:add(f.sidr_transaction, tvb(8, 8))
  tree:add(f.src_qp, tvb(16, 4))
  tree:add(f.qkey, tvb(20, 4))
  if len > 0 and tvb:len() >= 28 + len then
    tree:add(f.sidr_data, tvb(24, len))
  end
  pinfo.cols.info = "service resolution " .. (sidr_kinds[kind] or kind)
end

function weft.dissector(tvb, pinfo, root)
  pinfo.cols.protocol = "weft"
  local tree = root:add(weft, tvb())
  local second = tvb(1, 1):uint()
  if second == 0x53 then
    sidr(tvb, pinfo, tree)
  else
    tree:add(f.version, tvb(1, 1), rshift(second, 4))
    if second < 0x20 then
      version1(tvb, pinfo, tree)
    elseif band(second, 8) ~= 0 then
      control(tvb, pinfo, tree)
    else
      version2(tvb, pinfo, tree)
    end
  end
  add_crc(tvb, tree)
  return tvb:len()
end

-- Whether a datagram looks like one of ours.
local function ours(tvb)
  if tvb:captured_len() ~= tvb:reported_len() or tvb:len() < 24 or tvb(0, 1):uint() ~= 0x57 then
    return false
  end
  local second = tvb(1, 1):uint()
  if second == 0x53 then
    return tvb:len() >= 28 and tvb(0, 4):string() == "WSR1"
  elseif second == 0x10 then
    return tvb:len() >= 36
  end
  return (second >= 0x20 and second < 0x28 and tvb:len() >= 44) or (second >= 0x28 and second < 0x2e and tvb:len() <= 32)
end

weft:register_heuristic("udp", function(tvb, pinfo, root)
  if not ours(tvb) then
    return false
  end
  weft.dissector(tvb, pinfo, root)
  return true
end)

-- What the greetings of a TCP stream have said: "exs" or "sdp".
local spoken = {}

local stream_field = Field.new("tcp.stream")
local private_field = Field.new("iwarp_mpa.privatedata")
local fpdu_field = Field.new("iwarp_mpa.ulpdulength")

local exs = Proto("weft_exs", "weft EXS")
local exs_kinds = {
  "Advert", "Ack", "Small", "Wrote", "Retract", "Retracted", "Fin", "Credit", "PktAdvert", "Source", "SourceDone",
}
local transfers = { [1] = "direct", [2] = "indirect", [3] = "packet", [7] = "packet, cut off" }
local e = {
  version = ProtoField.uint8("weft_exs.version", "Version", base.DEC),
  type = ProtoField.uint8("weft_exs.type", "Type", base.DEC, { [1] = "SOCK_STREAM", [2] = "SOCK_SEQPACKET" }),
  design = ProtoField.uint8("weft_exs.design", "Design", base.DEC, { [0] = "stream", [1] = "the receiver adverts", [2] = "the sender adverts" }),
  direct = ProtoField.bool("weft_exs.direct", "Direct transfers", 8, nil, 0x01),
  indirect = ProtoField.bool("weft_exs.indirect", "Indirect transfers", 8, nil, 0x02),
  immediate = ProtoField.bool("weft_exs.immediate", "Immediate data", 8, nil, 0x04),
  receives = ProtoField.uint32("weft_exs.receives", "Control receives", base.DEC),
  fits = ProtoField.uint32("weft_exs.fits", "Payload that fits one", base.DEC),
  buffer_addr = ProtoField.uint64("weft_exs.buffer.addr", "Intermediate buffer", base.HEX),
  buffer_stag = ProtoField.uint32("weft_exs.buffer.stag", "Its STag", base.HEX),
  buffer_len = ProtoField.uint32("weft_exs.buffer.len", "Its length", base.DEC),
  kind = ProtoField.uint8("weft_exs.kind", "Message", base.DEC, exs_kinds),
  waitall = ProtoField.bool("weft_exs.waitall", "WAITALL", 8, nil, 0x01),
  transfer = ProtoField.uint8("weft_exs.transfer", "Transfer", base.DEC, transfers),
  credits = ProtoField.uint16("weft_exs.credits", "Credits", base.DEC),
  len = ProtoField.uint32("weft_exs.len", "Length", base.DEC),
  seq = ProtoField.uint64("weft_exs.seq", "Sequence number", base.DEC),
  phase = ProtoField.uint64("weft_exs.phase", "Phase", base.DEC),
  index = ProtoField.uint64("weft_exs.index", "Index", base.DEC),
  addr = ProtoField.uint64("weft_exs.addr", "Address", base.HEX),
  stag = ProtoField.uint32("weft_exs.stag", "STag", base.HEX),
  sent = ProtoField.uint64("weft_exs.sent", "Sent so far", base.DEC),
  payload = ProtoField.bytes("weft_exs.payload", "Payload"),
}
exs.fields = e

local sdp = Proto("weft_sdp", "weft SDP")
local mids = {
  [0xff] = "Data", [0xfe] = "SrcAvail", [0x80] = "SrcUpdate", [0x06] = "RdmaRdCompl", [0xfd] = "SinkAvail",
  [0x05] = "RdmaWrCompl", [0x09] = "SinkAvailCancel", [0x0a] = "SinkCancelAck", [0x02] = "DisConn",
}
local s = {
  version = ProtoField.uint8("weft_sdp.version", "Version", base.DEC),
  atomics = ProtoField.bool("weft_sdp.atomics", "Locks by atomics", 8, nil, 0x01),
  receives = ProtoField.uint16("weft_sdp.receives", "Receives", base.DEC),
  fits = ProtoField.uint32("weft_sdp.fits", "Payload that fits one", base.DEC),
  locks = ProtoField.uint16("weft_sdp.locks", "Locks", base.DEC),
  locks_addr = ProtoField.uint64("weft_sdp.locks.addr", "First lock", base.HEX),
  locks_stag = ProtoField.uint32("weft_sdp.locks.stag", "STag of the locks", base.HEX),
  mid = ProtoField.uint8("weft_sdp.mid", "Message", base.HEX, mids),
  oob_pres = ProtoField.bool("weft_sdp.oob_pres", "The last byte is urgent", 8, nil, 0x01),
  oob_pend = ProtoField.bool("weft_sdp.oob_pend", "An urgent byte waits", 8, nil, 0x02),
  bufs = ProtoField.uint16("weft_sdp.bufs", "Receives posted", base.DEC),
  len = ProtoField.uint32("weft_sdp.len", "Length of the message", base.DEC),
  mseq = ProtoField.uint32("weft_sdp.mseq", "Message number", base.DEC),
  mseq_ack = ProtoField.uint32("weft_sdp.mseq_ack", "Last message received", base.DEC),
  bytes = ProtoField.uint32("weft_sdp.bytes", "Bytes of the stream", base.DEC),
  stag = ProtoField.uint32("weft_sdp.stag", "STag", base.HEX),
  addr = ProtoField.uint64("weft_sdp.addr", "Address", base.HEX),
  index = ProtoField.uint32("weft_sdp.index", "Index of the source", base.DEC),
  position = ProtoField.uint64("weft_sdp.position", "Position in the stream", base.DEC),
  payload = ProtoField.bytes("weft_sdp.payload", "Payload"),
}
sdp.fields = s

local exs_malformed = ProtoExpert.new("weft_exs.malformed", "Not a message of EXS", expert.group.MALFORMED, expert.severity.ERROR)
local sdp_malformed = ProtoExpert.new("weft_sdp.malformed", "Not a message of SDP", expert.group.MALFORMED, expert.severity.ERROR)
exs.experts = { exs_malformed }
sdp.experts = { sdp_malformed }

-- Adds fields that follow each other: pairs of a field and its number of bytes (negative: left out). Returns where they end; nothing if
-- the bytes do.
local function add_fields(tvb, tree, at, layout)
  for i = 1, #layout, 2 do
    local field, len = layout[i], layout[i + 1]
    if tvb:len() < at + math.abs(len) then
      return nil
    end
    if len > 0 then
      tree:add(field, tvb(at, len))
    end
    at = at + math.abs(len)
  end
  return at
end

local exs_head = { e.kind, 1, e.kind, -1, e.credits, 2, e.len, 4 }
local packet = { e.index, 8, e.addr, 8, e.stag, 4, e.stag, -4 }
local exs_layouts = {
  [1] = { e.seq, 8, e.phase, 8, e.addr, 8, e.stag, 4, e.stag, -4 },
  [6] = { e.sent, 8 },
  [9] = packet,
  [10] = packet,
  [11] = { e.index, 8 },
}

-- These return what the column of information says.
local function exs_message(tvb, root)
  local tree = root:add(exs, tvb())
  local at = add_fields(tvb, tree, 0, exs_head)
  local kind = tvb(0, 1):uint()
  if at and kind == 1 then
    tree:add(e.waitall, tvb(1, 1))
  elseif at and kind == 4 then
    tree:add(e.transfer, tvb(1, 1))
  end
  at = at and add_fields(tvb, tree, at, exs_layouts[kind] or {})
  if at == nil or exs_kinds[kind] == nil then
    tree:add_proto_expert_info(exs_malformed)
    return "malformed"
  end
  if at < tvb:len() then
    tree:add(e.payload, tvb(at))
  end
  return string.format("%s, %d bytes", exs_kinds[kind], tvb(4, 4):uint())
end

-- What the immediate data of an RDMA Write says.
local function exs_notification(tvb, root)
  local tree = root:add(exs, tvb())
  add_fields(tvb, tree, 0, { e.transfer, 1, e.transfer, -1, e.credits, 2, e.len, 4 })
  local transfer = tvb(0, 1):uint()
  return string.format("Written, %s, %d bytes", transfers[transfer] or transfer, tvb(4, 4):uint())
end

local source = { s.bytes, 4, s.stag, 4, s.addr, 8, s.index, 4 }
local sdp_layouts = {
  [0xfe] = source,
  [0x80] = source,
  [0x06] = { s.bytes, 4, s.index, 4 },
  [0xfd] = { s.bytes, 4, s.stag, 4, s.addr, 8, s.position, 8 },
  [0x05] = { s.bytes, 4 },
}

local function sdp_message(tvb, root)
  local tree = root:add(sdp, tvb())
  local at = add_fields(tvb, tree, 0, { s.mid, 1, s.mid, -1, s.bufs, 2, s.len, 4, s.mseq, 4, s.mseq_ack, 4 })
  local mid = tvb(0, 1):uint()
  if at then
    tree:add(s.oob_pres, tvb(1, 1))
    tree:add(s.oob_pend, tvb(1, 1))
    at = add_fields(tvb, tree, at, sdp_layouts[mid] or {})
  end
  if at == nil or mids[mid] == nil then
    tree:add_proto_expert_info(sdp_malformed)
    return "malformed"
  end
  if at < tvb:len() then
    tree:add(s.payload, tvb(at))
  end
  return string.format("%s, mseq %d", mids[mid], tvb(8, 4):uint())
end

-- The greetings are private data of the start-up, which is a field of Wireshark's dissector. Revision 2 has four bytes in front (RFC 6581).
local function greeting(range, pinfo, root)
  if range:len() >= 36 and range(0, 1):uint() ~= 0x77 then
    range = range(4)
  end
  if range:len() < 32 then
    return nil
  end
  local magic = range(0, 4):string()
  if magic == "wexs" then
    local tree = root:add(exs, range, "weft EXS greeting")
    local bits = range(7, 1)
    add_fields(range, tree, 4, { e.version, 1, e.type, 1, e.design, 1, e.design, -1, e.receives, 4, e.fits, 4,
      e.buffer_addr, 8, e.buffer_stag, 4, e.buffer_len, 4 })
    tree:add(e.direct, bits)
    tree:add(e.indirect, bits)
    tree:add(e.immediate, bits)
    pinfo.cols.protocol = "weft EXS"
    pinfo.cols.info = "greeting"
    return "exs"
  elseif magic == "wSDP" then
    local tree = root:add(sdp, range, "weft SDP greeting")
    add_fields(range, tree, 4, { s.version, 1, s.version, -1, s.receives, 2, s.fits, 4, s.locks, 2, s.locks, -2,
      s.locks_addr, 8, s.locks_stag, 4 })
    tree:add(s.atomics, range(5, 1))
    pinfo.cols.protocol = "weft SDP"
    pinfo.cols.info = "greeting"
    return "sdp"
  end
end

-- What one DDP segment is of, if it is the first one of an untagged message (RFC 5041 4.3, RFC 5040 4.1). Wireshark's dissector hands on neither
-- Immediate Data nor the second Send of a packet, so this looks at the FPDUs itself.
local function ulpdu(range, what, root)
  if range:len() < 18 + 8 or band(range(0, 1):uint(), 0x80) ~= 0 or range(6, 4):uint() ~= 0 or range(14, 4):uint() ~= 0 then
    return nil
  end
  local opcode = band(range(1, 1):uint(), 0x0f)
  local payload = range(18)
  if what == "exs" and (opcode == 8 or opcode == 9) then
    return exs_notification(payload, root)
  elseif opcode >= 3 and opcode <= 6 then
    return what == "exs" and exs_message(payload, root) or sdp_message(payload, root)
  end
end

local names = { exs = "weft EXS", sdp = "weft SDP" }
local streams = Proto("weft_streams", "weft streams")
function streams.dissector(_, pinfo, root)
  local stream = stream_field()
  if stream == nil then
    return
  end
  for _, private in ipairs({ private_field() }) do
    spoken[stream.value] = greeting(private.range, pinfo, root) or spoken[stream.value]
  end
  local what = spoken[stream.value]
  if what == nil then
    return
  end
  local said = {}
  for _, fpdu in ipairs({ fpdu_field() }) do
    local bytes, at, len = fpdu.source, fpdu.offset + 2, fpdu.value
    if bytes:len() >= at + len then
      said[#said + 1] = ulpdu(bytes:range(at, len), what, root)
    end
  end
  if #said > 0 then
    pinfo.cols.protocol = names[what]
    pinfo.cols.info = table.concat(said, "; ")
  end
end
function streams.init()
  spoken = {}
end
register_postdissector(streams)
