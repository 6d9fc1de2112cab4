-- release: release the lease on a role, if the token still holds it.
--
-- KEYS[1]   claim
-- ARGV[1]   token of the claimant
-- returns   OK, HELD (another token holds it)

local held = redis.call('GET', KEYS[1])
if not held then return 0 end
if string.sub(held, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then return 5 end
redis.call('DEL', KEYS[1])
return 0
