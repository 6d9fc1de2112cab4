-- trim: remove what a worker has read from its log, and note how much of each run that is, so that it has room
-- again. The counts are of all entries so far: a repeated call changes nothing. Ended runs get no state again.
--
-- KEYS[1]   log
-- KEYS[2..] run hashes of the runs that had entries among those removed
-- ARGV[1]   id of the first entry that stays
-- ARGV[2]   the worker's index in the pipeline's order (d0, s1, .., sN, m1, ..), from 1
-- ARGV[3..] by run, in the order of KEYS[2..]: entries that the worker has read
-- returns   OK

redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
for at = 2, #KEYS do
    if redis.call('EXISTS', KEYS[at]) == 1 then redis.call('HSET', KEYS[at], 'r:' .. ARGV[2], ARGV[at + 1]) end
end
return 0
