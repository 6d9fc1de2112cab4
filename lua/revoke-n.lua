-- revoke: end a job on behalf of the scheduler: it was cancelled, waited too long, or lost a worker.
-- Raises the epoch, so that later writes of its owners are refused, and sends them the revoke envelope.
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
-- KEYS[10..] logs of all workers
-- ARGV[1]   job id
-- ARGV[2]   the epoch the caller expects
-- ARGV[3]   finish reason: cancelled or error
-- ARGV[4]   error, one line; '' if there is none
-- ARGV[5]   retention, ms
-- ARGV[6]   revoke envelope, naming the expected epoch plus one
-- ARGV[7]   cause of the error: lost or late
-- ARGV[8]   the scheduler as a holder; '' if it is not the scheduler that decides
-- ARGV[9]   the lost worker as a holder; '' if that is not why
-- returns   OK, DUP (the job has ended), STALE (its epoch has changed, the scheduler is not
--           the latest, or the worker is not lost: it is the latest, and its lease is in force)

-- include generations
-- include wake

local found = redis.call('HMGET', KEYS[1], 'state', 'epoch')
if not found[1] or found[1] == 'done' then return 1 end
if found[2] ~= ARGV[2] or not current(KEYS[8], ARGV[8]) then return 3 end
if ARGV[9] ~= '' and redis.call('EXISTS', KEYS[9]) == 1 and current(KEYS[8], ARGV[9]) then return 3 end

redis.call('HINCRBY', KEYS[1], 'epoch', 1)
if found[1] == 'running' then
    for at = 10, #KEYS do redis.call('XADD', KEYS[at], '*', 'f', 'scheduler', 'q', 0, 'm', ARGV[6]) end
    redis.call('SREM', KEYS[5], ARGV[1])
else
    redis.call('LREM', KEYS[6], 0, ARGV[1])
end
if ARGV[4] ~= '' then redis.call('XADD', KEYS[3], '*', 'kind', 'error', 'text', ARGV[4], 'cause', ARGV[7]) end
redis.call('XADD', KEYS[3], '*', 'kind', 'end', 'finish_reason', ARGV[3])
redis.call('HSET', KEYS[1], 'state', 'done', 'finish_reason', ARGV[3])
redis.call('DEL', KEYS[2])
for at = 1, 4 do
    if at ~= 2 then redis.call('PEXPIRE', KEYS[at], ARGV[5]) end
end
wake(KEYS[7], 'ended', ARGV[1])
return 0
