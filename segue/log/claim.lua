#!lua
-- Start the next epoch of a producer. KEYS[1] is "{run}:producer:<name>", KEYS[2] its window "{run}:seen:<name>".
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'seq', 0)
redis.call('DEL', KEYS[2])
return epoch
