#!lua
-- Append a batch: fencing, contiguity, deduplication, logical keys, session counters and the streams of the targets,
-- all in one step. KEYS[1] is "{run}:log"; every other key is derived from it and shares its hash tag, so that all lie
-- in one slot. ARGV[1]: size of the dedupe window; ARGV[2]: msgpack list of
-- {producer, epoch, seq, key, identity, targets, session, expected}; ARGV[3..]: the events' bytes in the same order.
-- Returns a flat list (code, value) per event: 0 appended at, 1 duplicate of (0: unknown), 2 conflict with,
-- 3 session is at, 4 fenced by epoch, 5 gap after seq, 6 epoch never claimed (current one).
--
-- Nothing is written before all reads that can fail have passed, and the append-only file holds the whole call as one
-- transaction: a crash leaves all of a batch or nothing.
--
-- The window is a ring of 8-byte doubles in one string per producer: slot (seq - 1) % window holds value * 4 + code.

local log = KEYS[1]
local prefix = string.sub(log, 1, -4)
local window = tonumber(ARGV[1])
local items = cmsgpack.unpack(ARGV[2])
local heads = prefix .. 'heads'
local tail -- the last position, read together with the first producer
local producers = {}
local answers = {}

local function text(number)
  return string.format('%.0f', number) -- plain concatenation turns 1e15 into an exponent
end

local function load_producer(name)
  local state = redis.call('HMGET', heads, 'tail', 'epoch:' .. name, 'seq:' .. name)
  tail = tail or tonumber(state[1] or '0')
  local last = tonumber(state[3] or '0')
  return { epoch = tonumber(state[2] or '0'), last = last, before = last, packed = {} }
end

local function recall(name, producer, seq)
  local packed
  if seq > producer.before then
    packed = producer.packed[seq - producer.before]
  elseif seq > producer.last - window then
    local at = ((seq - 1) % window) * 8
    packed = redis.call('GETRANGE', prefix .. 'seen:' .. name, at, at + 7)
  else
    return 1, 0
  end
  local value = struct.unpack('>d', packed)
  local code = value % 4
  return (code == 0) and 1 or code, (value - code) / 4
end

local function judge(item, data)
  local key, identity, session = item[4], item[5], item[7]
  local position = tail + 1
  if key ~= '' and redis.call('HSETNX', prefix .. 'keys', key, text(position) .. ':' .. identity) == 0 then
    local standing = redis.call('HGET', prefix .. 'keys', key)
    local colon = string.find(standing, ':', 1, true)
    return (string.sub(standing, colon + 1) == identity) and 1 or 2, tonumber(string.sub(standing, 1, colon - 1))
  end
  if session ~= '' then
    local have = tonumber(redis.call('HGET', prefix .. 'sessions', session) or '0')
    if have ~= item[8] then
      if key ~= '' then redis.call('HDEL', prefix .. 'keys', key) end
      return 3, have
    end
    redis.call('HSET', prefix .. 'sessions', session, text(have + 1))
  end
  local id = text(position) .. '-0'
  redis.call('XADD', log, id, 'e', data)
  for _, target in ipairs(item[6]) do
    redis.call('XADD', prefix .. 'to:' .. target, id, 'e', data)
  end
  tail = position
  return 0, position
end

local function append(item, data)
  local name, epoch, seq = item[1], item[2], item[3]
  local producer = producers[name]
  if not producer then
    producer = load_producer(name)
    producers[name] = producer
  end
  if epoch < producer.epoch then return 4, producer.epoch end
  if epoch > producer.epoch then return 6, producer.epoch end
  if seq <= producer.last then return recall(name, producer, seq) end
  if seq ~= producer.last + 1 then return 5, producer.last end
  local code, value = judge(item, data)
  producer.last = seq
  producer.packed[#producer.packed + 1] = struct.pack('>d', value * 4 + code)
  return code, value
end

for i, item in ipairs(items) do
  answers[2 * i - 1], answers[2 * i] = append(item, ARGV[i + 2])
end

local moved = { 'tail', text(tail or 0) }
for name, producer in pairs(producers) do
  if producer.last > producer.before then
    local packed = table.concat(producer.packed)
    local slot = producer.before % window
    local room = (window - slot) * 8
    redis.call('SETRANGE', prefix .. 'seen:' .. name, slot * 8, string.sub(packed, 1, room))
    if #packed > room then
      redis.call('SETRANGE', prefix .. 'seen:' .. name, 0, string.sub(packed, room + 1))
    end
    moved[#moved + 1] = 'seq:' .. name
    moved[#moved + 1] = text(producer.last)
  end
end
if #moved > 2 then redis.call('HSET', heads, unpack(moved)) end
return answers
