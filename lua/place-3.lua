-- place: put a job back into the queue, or among the running jobs, if it has lost its place there. Anybody may delete
-- these keys; what waits and what runs is said by the jobs themselves, too.
--
-- KEYS[1]   job hash
-- KEYS[2]   queue
-- KEYS[3]   running jobs
-- ARGV[1]   job id
-- returns   OK, DUP (it has its place), STALE (it has ended, or its hash is gone)

local job, queue, running, id = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
if redis.call('TYPE', job).ok ~= 'hash' then return 3 end
local state = redis.call('HGET', job, 'state')
if state ~= 'queued' and state ~= 'running' then return 3 end
if redis.call('LPOS', queue, id) or redis.call('SISMEMBER', running, id) == 1 then return 1 end

if state == 'queued' then redis.call('RPUSH', queue, id) else redis.call('SADD', running, id) end
return 0
