#!lua
-- Restart the idle time of deliveries that this consumer still holds. A plain XCLAIM would steal them back from whoever
-- reclaimed them meanwhile. KEYS: stream. ARGV: group, consumer, ids. Returns how many it still holds.
local held = 0
for i = 3, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    held = held + 1
  end
end
return held
