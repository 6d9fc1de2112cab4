-- revoke: take a job from its workers on behalf of the scheduler: it was cancelled, waited too long, or lost a worker.
-- Ends it; or puts it back in front of the queue, to go on behind what is committed, unless that was done too often or
-- its text is complete. Raises the epoch, so that later writes of its owners are refused, and sends them the revoke
-- envelope.
--
-- KEYS[1]   job hash
-- KEYS[2]   run hash: sequence numbers and task graph
-- KEYS[3]   output stream
-- KEYS[4]   recording stream
-- KEYS[5]   running jobs
-- KEYS[6]   queue
-- KEYS[7]   the scheduler's log, to wake it
-- KEYS[8]   generations
-- KEYS[9]   claim of the lost worker's role; that of any role if none was lost
-- KEYS[10]  the job's request
-- KEYS[11..] logs of all workers
-- ARGV[1]   job id
-- ARGV[2]   the epoch the caller expects
-- ARGV[3]   finish reason: cancelled or error
-- ARGV[4]   error, one line; '' if there is none
-- ARGV[5]   retention, ms
-- ARGV[6]   revoke envelope, naming the expected epoch plus one
-- ARGV[7]   cause of the error: lost or late
-- ARGV[8]   the scheduler as a holder; '' if it is not the scheduler that decides
-- ARGV[9]   the lost worker as a holder; '' if that is not why
-- ARGV[10]  how many times a running job may be put back; 0: it ends. A worker that left its role does not count.
-- A job that waits or runs without a hash, which was deleted or is of another type, leaves both and ends with an error.
-- returns   OK, DUP (the job has ended), STALE (its epoch has changed, the scheduler is not
--           the latest, or the worker is not lost: it is the latest, and its lease is in force)

-- include generations
-- include wake

local known = redis.call('TYPE', KEYS[1]).ok == 'hash'
local placed = redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1 or redis.call('LPOS', KEYS[6], ARGV[1])
if not known and not placed then return 1 end
local found = known and redis.call('HMGET', KEYS[1], 'state', 'epoch', 'again', 'text_end') or {}
if found[1] == 'done' then return 1 end
if known and found[2] ~= ARGV[2] or not current(KEYS[8], ARGV[8]) then return 3 end
if ARGV[9] ~= '' and redis.call('EXISTS', KEYS[9]) == 1 and current(KEYS[8], ARGV[9]) then return 3 end

local function tell_workers()
    for at = 11, #KEYS do redis.call('XADD', KEYS[at], '*', 'f', 'scheduler', 'q', 0, 'm', ARGV[6]) end
end

if not known then
    local text = 'the record of the job was deleted or damaged at the broker; submit the job again'
    redis.call('SREM', KEYS[5], ARGV[1])
    redis.call('LREM', KEYS[6], 0, ARGV[1])
    redis.call('DEL', KEYS[1], KEYS[2], KEYS[10])
    tell_workers()
    redis.call('XADD', KEYS[3], '*', 'kind', 'error', 'text', text, 'cause', 'lost')
    redis.call('XADD', KEYS[3], '*', 'kind', 'end', 'finish_reason', 'error')
    redis.call('PEXPIRE', KEYS[3], ARGV[5])
    wake(KEYS[7], 'ended', ARGV[1])
    return 0
end

local reason, text, goes_on = ARGV[3], ARGV[4], false
local counts = not has_left(KEYS[8], ARGV[9])
if found[1] == 'running' and tonumber(ARGV[10]) > 0 then
    if found[4] then
        reason, text = found[4], ''
    else
        goes_on = not counts or tonumber(found[3] or '0') < tonumber(ARGV[10])
    end
end

redis.call('HINCRBY', KEYS[1], 'epoch', 1)
if found[1] == 'running' then
    tell_workers()
    redis.call('SREM', KEYS[5], ARGV[1])
else
    redis.call('LREM', KEYS[6], 0, ARGV[1])
end
redis.call('DEL', KEYS[2])
redis.call('PEXPIRE', KEYS[4], ARGV[5])
if goes_on then
    redis.call('HSET', KEYS[1], 'state', 'queued', 'holders', ' ')
    if counts then redis.call('HINCRBY', KEYS[1], 'again', 1) end
    redis.call('LPUSH', KEYS[6], ARGV[1])
    wake(KEYS[7], 'admitted', ARGV[1])
else
    if text ~= '' then redis.call('XADD', KEYS[3], '*', 'kind', 'error', 'text', text, 'cause', ARGV[7]) end
    redis.call('XADD', KEYS[3], '*', 'kind', 'end', 'finish_reason', reason)
    redis.call('HSET', KEYS[1], 'state', 'done', 'finish_reason', reason)
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
    redis.call('PEXPIRE', KEYS[3], ARGV[5])
    redis.call('PEXPIRE', KEYS[10], ARGV[5])
    wake(KEYS[7], 'ended', ARGV[1])
end
return 0
