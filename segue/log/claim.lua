#!lua
-- Start the next epoch of a producer. KEYS: "{run}:heads". ARGV: the producer's name. Its window needs no clearing: only
-- slots of seqs up to the last one are ever read, and those the new epoch has written.
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch:' .. ARGV[1], 1)
redis.call('HSET', KEYS[1], 'seq:' .. ARGV[1], 0)
return epoch
