-- assign: assign a waiting job to the workers that hold the pipeline's roles, under a new epoch.
--
-- KEYS[1]   job hash
-- KEYS[2]   queue
-- KEYS[3]   running jobs
-- KEYS[4]   submissions
-- KEYS[5]   generations
-- ARGV[1]   job id
-- ARGV[2]   most jobs that may run
-- ARGV[3]   the new epoch: the job's plus one
-- ARGV[4]   submit envelope, naming that epoch and the holders' generations
-- ARGV[5]   holders: roles and generations of the workers that serve it, like ' draft:2 verify-1:1 '
-- ARGV[6]   the scheduler as a holder; '' if no scheduler asks
-- returns   OK, GAP (the job does not wait), STALE (its hash is gone, its epoch has changed, or a holder is not the
--           latest), FULL (ARGV[2] jobs run already)

-- include generations

if not redis.call('LPOS', KEYS[2], ARGV[1]) then return 2 end
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return 3 end
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch')
if found[1] ~= 'queued' or tonumber(found[2]) + 1 ~= tonumber(ARGV[3]) then return 3 end
if not current(KEYS[5], ARGV[5] .. ARGV[6]) then return 3 end
if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[2]) then return 4 end

redis.call('LREM', KEYS[2], 1, ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], 'state', 'running', 'epoch', ARGV[3], 'holders', ARGV[5])
redis.call('XADD', KEYS[4], '*', 'f', 'scheduler', 'q', 1, 'm', ARGV[4])
return 0
