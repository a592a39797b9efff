-- A dissector for the formats of weft that Wireshark does not know. Made by `weft dissector`.
--
--   tshark -X lua_script:weft.lua -r capture.pcap
--   or copy it into the plugin folder that Wireshark names in Help, About, Folders.
--
-- It knows: datagrams of versions 1 and 2 with RDMA Write-Record and control datagrams, and the requests and replies for a
-- datagram queue pair (docs/spec/dgram.md). Any UDP port: it looks at the bytes.

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
