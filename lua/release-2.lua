-- release: release the lease on a role, if the token still holds it. One that has expired may be left, too, as long as
-- nobody else has taken the role.
--
-- KEYS[1]   claim
-- KEYS[2]   generations
-- ARGV[1]   token of the claimant
-- ARGV[2]   role
-- ARGV[3]   1: the holder leaves, and its jobs go on elsewhere; 0: it has stopped working
-- returns   OK, HELD (another token holds it)

local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then return 5 end
redis.call('DEL', KEYS[1])
local found = redis.call('HMGET', KEYS[2], ARGV[2], 'by:' .. ARGV[2])
if ARGV[3] == '1' and found[2] == ARGV[1] then redis.call('HSET', KEYS[2], 'left:' .. ARGV[2], found[1]) end
return 0
