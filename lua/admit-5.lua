-- admit: put a job from the intake into the pipeline's queue, or end it. Idempotent: the intake may be read
-- again. The fields of a job that is ended are not kept: they are not used again, and may be large.
--
-- KEYS[1]   job hash
-- KEYS[2]   queue
-- KEYS[3]   output stream
-- KEYS[4]   idempotency key
-- KEYS[5]   the scheduler's log, to wake it
-- ARGV[1]   job id
-- ARGV[2]   most jobs in the queue
-- ARGV[3]   retention, ms
-- ARGV[4]   1 if the caller gave an idempotency key, else 0
-- ARGV[5]   error: why the job is refused, one line; '' to admit it
-- ARGV[6..] submitted fields, name and value in turn
-- returns   OK, DUP (admitted before; or another job has the idempotency key: the output says which),
--           FULL (the queue is full: the output says so)

-- include wake

local job, queue, out, idempotency = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, most, retention, refused = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[5]

if redis.call('EXISTS', job) == 1 then return 1 end

local answer = 0
local earlier = ARGV[4] == '1' and redis.call('GET', idempotency) or false
if refused == '' and earlier then
    answer, refused = 1, 'the idempotency key belongs to job ' .. earlier
elseif refused == '' and redis.call('LLEN', queue) >= most then
    answer, refused = 4, 'the queue is full: ' .. most .. ' jobs wait already; submit again later'
end

if refused ~= '' then
    redis.call('HSET', job, 'state', 'done', 'epoch', 0, 'finish_reason', 'error')
    local entry = {'kind', 'error', 'text', refused, 'cause', answer == 4 and 'full' or 'refused'}
    if answer == 1 then entry[7], entry[8] = 'duplicate_of', earlier end
    redis.call('XADD', out, '*', unpack(entry))
    redis.call('XADD', out, '*', 'kind', 'end', 'finish_reason', 'error')
    redis.call('PEXPIRE', job, retention)
    redis.call('PEXPIRE', out, retention)
    return answer
end
redis.call('HSET', job, 'state', 'queued', 'epoch', 0)
for at = 6, #ARGV, 2 do redis.call('HSET', job, 'f:' .. ARGV[at], ARGV[at + 1]) end
if ARGV[4] == '1' then redis.call('SET', idempotency, id, 'PX', retention) end
redis.call('RPUSH', queue, id)
wake(KEYS[5], 'admitted', id)
return 0
