-- claim: take or renew the lease on a role. An expired lease frees the role; no lease grants the right to write.
--
-- KEYS[1]   claim
-- ARGV[1]   token of the claimant, without spaces
-- ARGV[2]   lifetime, ms
-- ARGV[3]   facts about the claimant, JSON
-- returns   OK, HELD (another token holds it)

local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then return 5 end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[3], 'PX', ARGV[2])
return 0
