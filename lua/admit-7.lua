-- admit: put a job from the intake into the pipeline's queue, or end it. Idempotent: the intake may be read
-- again. The fields of a job that is ended are not kept: they are not used again, and may be large.
--
-- KEYS[1]   job hash
-- KEYS[2]   queue
-- KEYS[3]   output stream
-- KEYS[4]   idempotency key: the job that has it, and the digest of that job's fields
-- KEYS[5]   the scheduler's log, to wake it
-- KEYS[6]   hash of the job in ARGV[6]; that of any name if there is none
-- KEYS[7]   the job's request
-- ARGV[1]   job id
-- ARGV[2]   most jobs in the queue
-- ARGV[3]   retention, ms
-- ARGV[4]   digest of the submitted fields if the caller gave an idempotency key, else ''
-- ARGV[5]   error: why the job is refused, one line; '' to admit it
-- ARGV[6]   what KEYS[4] holds, as the caller has read it; '' if nothing
-- ARGV[7..] submitted fields, name and value in turn
-- A job that has failed, or is gone, loses its idempotency key to the next one.
-- returns   OK, DUP (admitted before; or another job has the idempotency key: the output says which, and whether its
--           fields are others), FULL (the queue is full: the output says so), STALE (KEYS[4] does not hold ARGV[6])

-- include wake

local job, queue, out, idempotency = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, most, retention, digest, refused = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]

if redis.call('EXISTS', job) == 1 then return 1 end

local held = ''
if digest ~= '' and redis.call('TYPE', idempotency).ok == 'string' then held = redis.call('GET', idempotency) end
if held ~= ARGV[6] then return 3 end
local earlier, other = string.match(held, '^(%S+) (%S+)$')
if earlier then
    local known = redis.call('TYPE', KEYS[6]).ok == 'hash'
    if not known or redis.call('HGET', KEYS[6], 'finish_reason') == 'error' then earlier = nil end
end

local answer = 0
if refused == '' and earlier and other ~= digest then
    answer, refused = 1, 'the idempotency key belongs to job ' .. earlier .. ' with other fields; use another key'
    earlier = nil
elseif refused == '' and earlier then
    answer, refused = 1, 'the idempotency key belongs to job ' .. earlier
elseif refused == '' and redis.call('LLEN', queue) >= most then
    answer, refused = 4, 'the queue is full: ' .. most .. ' jobs wait already; submit again later'
end

if refused ~= '' then
    redis.call('HSET', job, 'state', 'done', 'epoch', 0, 'finish_reason', 'error')
    local entry = {'kind', 'error', 'text', refused, 'cause', answer == 4 and 'full' or 'refused'}
    if answer == 1 and earlier then entry[7], entry[8] = 'duplicate_of', earlier end
    redis.call('XADD', out, '*', unpack(entry))
    redis.call('XADD', out, '*', 'kind', 'end', 'finish_reason', 'error')
    redis.call('PEXPIRE', job, retention)
    redis.call('PEXPIRE', out, retention)
    return answer
end
redis.call('HSET', job, 'state', 'queued', 'epoch', 0)
redis.call('DEL', KEYS[7])
for at = 7, #ARGV, 2 do redis.call('HSET', KEYS[7], 'f:' .. ARGV[at], ARGV[at + 1]) end
if digest ~= '' then redis.call('SET', idempotency, id .. ' ' .. digest, 'PX', retention) end
redis.call('RPUSH', queue, id)
wake(KEYS[5], 'admitted', id)
return 0
