-- trim: remove what a worker has read from its log, and note how much of each run that is, so that it has room
-- again; or from another of its streams what it has read or begins behind, of which there is no more to note. The counts are of all entries so far: a
-- repeated call changes nothing. Ended runs get no state again. A worker that was replaced removes nothing: its
-- successor reads on.
--
-- KEYS[1]   log, rows, or submissions
-- KEYS[2]   generations
-- KEYS[3..] run hashes of the runs that had entries among those removed from the log
-- ARGV[1]   id of the first entry that stays
-- ARGV[2]   the worker's index in the pipeline's order (d0, s1, .., sN, m1, ..), from 1
-- ARGV[3]   the worker as a holder
-- ARGV[4..] by run, in the order of KEYS[3..]: entries that the worker has read
-- returns   OK, STALE

-- include generations

if not current(KEYS[2], ARGV[3]) then return 3 end

redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
for at = 3, #KEYS do
    if redis.call('EXISTS', KEYS[at]) == 1 then redis.call('HSET', KEYS[at], 'r:' .. ARGV[2], ARGV[at + 1]) end
end
return 0
