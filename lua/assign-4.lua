-- assign: assign a waiting job to the draft worker, under a new epoch.
--
-- KEYS[1]   job hash
-- KEYS[2]   queue
-- KEYS[3]   running jobs
-- KEYS[4]   the draft worker's log
-- ARGV[1]   job id
-- ARGV[2]   most jobs that may run
-- ARGV[3]   the new epoch: the job's plus one
-- ARGV[4]   submit envelope, naming that epoch
-- ARGV[5]   owners: the lease tokens of the workers that serve it, JSON by role
-- returns   OK, GAP (the job does not wait), STALE (its epoch has changed), FULL (ARGV[2] jobs run already)

if not redis.call('LPOS', KEYS[2], ARGV[1]) then return 2 end
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch')
if found[1] ~= 'queued' or tonumber(found[2]) + 1 ~= tonumber(ARGV[3]) then return 3 end
if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[2]) then return 4 end

redis.call('LREM', KEYS[2], 1, ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], 'state', 'running', 'epoch', ARGV[3], 'owners', ARGV[5])
redis.call('XADD', KEYS[4], '*', 'f', 'scheduler', 'q', 1, 'm', ARGV[4])
return 0
