-- record: one more line of a job's recording, which lives for the retention time after its last line.
-- Not fenced: what a node saw and did is worth knowing also after it lost the job.
--
-- KEYS[1]   recording stream
-- ARGV[1]   line
-- ARGV[2]   retention, ms
-- returns   OK

redis.call('XADD', KEYS[1], '*', 'l', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 0
