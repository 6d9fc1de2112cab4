-- renew_intake: give the intake ids to assign again. An entry with an id far in the future, which anybody may add, leaves
-- the ids of later ones behind it; behind the largest id there is none, and nobody can submit a job any more. So may
-- a key of another type in its place. Entries keep their ids, but for those in the future, which get new ones.
--
-- KEYS[1]   intake
-- ARGV[1]   most entries to take over
-- ARGV[2]   consumer group of its readers, which reads all of them again
-- ARGV[3]   how far behind the server's clock an id may be, ms
-- returns   OK, DUP (its ids are good), FULL (it has more entries: read them first)

-- include ids

local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return 1 end
local now = redis.call('TIME')
local latest = tonumber(now[1]) * 1000 + tonumber(ARGV[3])

local kept = {}
if kind == 'stream' then
    local facts = redis.call('XINFO', 'STREAM', KEYS[1])
    for at = 1, #facts, 2 do
        if facts[at] == 'last-generated-id' and not is_later(facts[at + 1], latest) then return 1 end
    end
    if redis.call('XLEN', KEYS[1]) > tonumber(ARGV[1]) then return 4 end
    kept = redis.call('XRANGE', KEYS[1], '-', '+')
end

redis.call('DEL', KEYS[1])
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[2], '0', 'MKSTREAM')
for _, entry in ipairs(kept) do
    local id = is_later(entry[1], latest) and '*' or entry[1]
    redis.call('XADD', KEYS[1], id, unpack(entry[2]))
end
return 0
