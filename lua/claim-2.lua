-- claim: take or renew the lease on a role. An expired lease frees the role; no lease grants the right to write. A claim by
-- another token than the latest raises the role's generation, by which the role's earlier holders are refused. It is at
-- least the server's clock, ms: later than all before, even if what was known of them was deleted.
--
-- KEYS[1]   claim
-- KEYS[2]   generations
-- ARGV[1]   token of the claimant, without spaces
-- ARGV[2]   lifetime, ms
-- ARGV[3]   facts about the claimant, JSON
-- ARGV[4]   role
-- returns   OK, HELD (another token holds it)

local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then return 5 end
-- A full broker refuses a script's first write if that may take memory. A renewal takes none, and is not refused: a holder
-- would lose its role, and everybody wait longer.
if held then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
local latest = redis.call('HGET', KEYS[2], 'by:' .. ARGV[4])
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[3], 'PX', ARGV[2])
if latest ~= ARGV[1] then
    local now = redis.call('TIME')
    local before = tonumber(redis.call('HGET', KEYS[2], ARGV[4]) or '') or 0
    local number = math.max(before + 1, now[1] * 1000 + math.floor(now[2] / 1000))
    redis.call('HSET', KEYS[2], ARGV[4], string.format('%.0f', number), 'by:' .. ARGV[4], ARGV[1])
end
return 0
