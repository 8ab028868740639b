#!lua
-- Acknowledge a delivery and put it among the dead letters, once. KEYS: stream, dead-letter stream.
-- ARGV: group, id, reason. Returns 1 if it was pending.
local pending = redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
if pending == 1 then
  redis.call('XADD', KEYS[2], '*', 'position', string.match(ARGV[2], '^%d+'), 'reason', ARGV[3])
end
return pending
