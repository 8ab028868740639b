#!lua
-- Hand pending deliveries to a consumer, counting one more delivery of each: either its own (after a restart) or those
-- that others left idle. XAUTOCLAIM would also give a consumer its own slow ones back, hence XPENDING and XCLAIM.
-- KEYS: stream, dead-letter stream. ARGV: group, consumer, "own" | "others", least idle time in ms (of others),
-- limit, then the ids to leave alone. Returns {taken as (id, deliveries, bytes), lost ids}. A pending entry that was
-- trimmed from the stream cannot be delivered any more: it goes to the dead letters instead of vanishing.
local stream, dead = KEYS[1], KEYS[2]
local group, consumer, own = ARGV[1], ARGV[2], ARGV[3] == 'own'
local idle, limit = ARGV[4], tonumber(ARGV[5])
local skip = {}
for i = 6, #ARGV do skip[ARGV[i]] = true end

local ids, counts, from = {}, {}, '-'
while #ids < limit do
  local page
  if own then
    page = redis.call('XPENDING', stream, group, from, '+', 100, consumer)
  else
    page = redis.call('XPENDING', stream, group, 'IDLE', idle, from, '+', 100)
  end
  for _, pending in ipairs(page) do
    local id = pending[1]
    from = '(' .. id
    if #ids < limit and not skip[id] and (own or pending[2] ~= consumer) then
      ids[#ids + 1] = id
      counts[id] = pending[4] + 1
    end
  end
  if #page < 100 then break end
end
if #ids == 0 then return { {}, {} } end

local taken, lost = {}, {}
for first = 1, #ids, 1000 do -- unpack takes some thousands at most
  local claimed = redis.call('XCLAIM', stream, group, consumer, 0, unpack(ids, first, math.min(first + 999, #ids)))
  for _, entry in ipairs(claimed) do
    taken[#taken + 1] = { entry[1], counts[entry[1]], entry[2][2] }
    counts[entry[1]] = nil
  end
end
for _, id in ipairs(ids) do
  if counts[id] then
    lost[#lost + 1] = id
    redis.call('XACK', stream, group, id)
    redis.call('XADD', dead, '*', 'position', string.match(id, '^%d+'), 'reason',
      'trimmed from the stream before it was acknowledged')
  end
end
return { taken, lost }
