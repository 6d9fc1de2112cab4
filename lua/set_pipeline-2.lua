-- set_pipeline: write the pipeline's record, in place of whatever is there.
--
-- KEYS[1]   record
-- KEYS[2]   generations
-- ARGV[1]   the scheduler as a holder; '' if it is not a scheduler under a lease that writes it
-- ARGV[2..] fields, name and value in turn
-- returns   OK, STALE (the scheduler is not the latest)

-- include generations

if not current(KEYS[2], ARGV[1]) then return 3 end

redis.call('DEL', KEYS[1])
for at = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
return 0
