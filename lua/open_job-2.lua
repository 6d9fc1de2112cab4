-- open_job: store the prompt and set the offset from it, before any commit.
--
-- KEYS[1]   job hash
-- KEYS[2]   the job's request
-- ARGV[1]   epoch
-- ARGV[2]   offset: context length before the first commit
-- ARGV[3]   prompt token ids, a JSON list
-- ARGV[4]   strategy as built
-- ARGV[5]   the caller as a holder
-- returns   OK, DUP, STALE

-- include fence

if not fenced(KEYS[1], ARGV[1], ARGV[5]) then return 3 end
if redis.call('HEXISTS', KEYS[1], 'offset') == 1 then return 1 end
redis.call('HSET', KEYS[2], 'prompt_token_ids', ARGV[3])
redis.call('HSET', KEYS[1], 'offset', ARGV[2], 'emitted', 0, 'strategy', ARGV[4])
return 0
