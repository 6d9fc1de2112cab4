-- finish: end a running job, on behalf of its owner. Its data is kept for the retention time.
--
-- KEYS[1]   job hash
-- KEYS[2]   run hash: sequence numbers and task graph
-- KEYS[3]   output stream
-- KEYS[4]   recording stream
-- KEYS[5]   running jobs
-- KEYS[6]   the scheduler's log, to wake it
-- KEYS[7]   the job's request
-- ARGV[1]   epoch
-- ARGV[2]   job id
-- ARGV[3]   finish reason: eos, length, cancelled or error
-- ARGV[4]   error, one line; '' if there is none
-- ARGV[5]   stats, JSON
-- ARGV[6]   retention, ms
-- ARGV[7]   the caller as a holder
-- ARGV[8]   cause of the error
-- returns   OK, STALE

-- include fence
-- include wake

if not fenced(KEYS[1], ARGV[1], ARGV[7]) then return 3 end
if ARGV[4] ~= '' then redis.call('XADD', KEYS[3], '*', 'kind', 'error', 'text', ARGV[4], 'cause', ARGV[8]) end
redis.call('XADD', KEYS[3], '*', 'kind', 'end', 'finish_reason', ARGV[3], 'stats', ARGV[5])
redis.call('HSET', KEYS[1], 'state', 'done', 'finish_reason', ARGV[3])
redis.call('SREM', KEYS[5], ARGV[2])
redis.call('DEL', KEYS[2])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
redis.call('PEXPIRE', KEYS[4], ARGV[6])
redis.call('PEXPIRE', KEYS[7], ARGV[6])
wake(KEYS[6], 'ended', ARGV[2])
return 0
