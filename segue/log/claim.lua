#!lua
-- Start the next epoch of a producer. KEYS: "{run}:heads", the producer's window "{run}:seen:<name>". ARGV: its name.
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch:' .. ARGV[1], 1)
redis.call('HSET', KEYS[1], 'seq:' .. ARGV[1], 0)
redis.call('DEL', KEYS[2])
return epoch
