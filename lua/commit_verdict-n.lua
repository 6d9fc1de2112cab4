-- commit_verdict: move a job forward. Appends the accepted tokens to the output, advances the offset,
-- puts the prune into every stage's log, completes tasks. All or nothing, and idempotent.
--
-- KEYS[1]   job hash
-- KEYS[2]   run hash: sequence numbers and task graph
-- KEYS[3]   output stream
-- KEYS[4..] logs of all workers, in the pipeline's order (d0, s1, .., sN, m1, ..)
-- ARGV[1]   epoch
-- ARGV[2]   cap: entries of the run that may wait in a log, and entries of the output
-- ARGV[3]   offset the caller expects: context length before the commit
-- ARGV[4]   number of accepted rows, by which the offset advances
-- ARGV[5]   output tokens before the commit
-- ARGV[6]   number of new output tokens
-- ARGV[7]   their ids, a JSON list
-- ARGV[8]   their text, whole characters only
-- ARGV[9]   characters that each token added to the text, a JSON list
-- ARGV[10]  finish reason, '' if the text is not complete
-- ARGV[11]  prune envelope
-- ARGV[12]  stamp of an emulated run, '' in any other; its seconds go into the output as 'at'
-- ARGV[13]  number of stages, N
-- ARGV[14]  the caller as a holder
-- ARGV[15]  the tokens' log-probabilities, '' if the job asked for none
-- ARGV[16..] sequence number of the prune per stage log, then tasks to complete
-- returns   OK, DUP (the run is past the offset), GAP (it has not reached it, or a sequence number is
--           known already), STALE, FULL

-- include fence
-- include log
-- include graph

local job, run, out, logs = KEYS[1], KEYS[2], KEYS[3], {}
for at = 4, #KEYS do logs[at - 3] = KEYS[at] end
local cap, offset, stages, stamp = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[13]), ARGV[12]

if not fenced(job, ARGV[1], ARGV[14]) then return 3 end
local stored = tonumber(redis.call('HGET', job, 'offset') or '-1')
if offset < stored then return 1 end
if offset > stored then return 2 end
for stage = 1, stages do
    local last = tonumber(redis.call('HGET', run, 'q:d0:' .. (stage + 1)) or '0')
    if tonumber(ARGV[15 + stage]) <= last then return 2 end
    if not has_room(run, stage + 1, cap) then return 4 end
end
if redis.call('XLEN', out) >= cap then return 4 end

for stage = 1, stages do
    append(run, logs, stage + 1, 'd0', ARGV[15 + stage], ARGV[11], stamp)
    redis.call('HSET', run, 'q:d0:' .. (stage + 1), ARGV[15 + stage])
end
local entry = {'kind', 'tokens', 'offset', ARGV[5], 'ids', ARGV[7], 'text', ARGV[8], 'sizes', ARGV[9]}
if ARGV[10] ~= '' then
    entry[#entry + 1], entry[#entry + 2] = 'finish_reason', ARGV[10]
end
if ARGV[15] ~= '' then
    entry[#entry + 1], entry[#entry + 2] = 'logprobs', ARGV[15]
end
if stamp ~= '' then
    entry[#entry + 1], entry[#entry + 2] = 'at', string.match(stamp, '^%S+')
end
redis.call('XADD', out, '*', unpack(entry))
redis.call('PEXPIRE', run, RUN_MS)
redis.call('HSET', job, 'offset', offset + tonumber(ARGV[4]), 'emitted', tonumber(ARGV[5]) + tonumber(ARGV[6]))
if ARGV[10] ~= '' then redis.call('HSET', job, 'text_end', ARGV[10]) end
for at = 16 + stages, #ARGV do graph_complete(run, logs, ARGV[at], stamp) end
return 0
