-- record: append a line to a run's recording, which is kept for the retention time after its last line.
-- Not fenced: the steps of a worker that has lost the job are recorded, too. A line that is written again stands
-- twice; it has its worker and number, so that no two lines are alike, and readers leave out repeats.
--
-- KEYS[1]   recording stream
-- ARGV[1]   line
-- ARGV[2]   retention, ms
-- returns   OK

redis.call('XADD', KEYS[1], '*', 'l', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 0
