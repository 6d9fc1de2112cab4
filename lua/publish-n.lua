-- publish: deliver one message of a run, at once or as a task of its graph, and complete tasks.
-- The one write of a hop: fence, sequence number, envelope and graph in one change.
--
-- KEYS[1]   job hash
-- KEYS[2]   run hash: sequence numbers and task graph
-- KEYS[3..] logs of all workers, for messages and released tasks, in the pipeline's order (d0, s1, .., sN, m1, ..)
-- ARGV[1]   epoch
-- ARGV[2]   cap: entries of the run that may wait in a log
-- ARGV[3]   sender
-- ARGV[4]   receiver's index in KEYS[3..], from 1; 0: no message, complete tasks only
-- ARGV[5]   sequence number; 0 for a task. Numbers may be left out: those messages went straight.
-- ARGV[6]   task name; '' for a message delivered at once
-- ARGV[7]   envelope
-- ARGV[8]   stamp of an emulated run, '' in any other
-- ARGV[9]   the caller as a holder
-- ARGV[10]  number of dependencies, then their names
-- ARGV[..]  tasks to complete
-- returns   OK, DUP (sequence number or task known; only the completions are carried out), STALE, FULL

-- include fence
-- include log
-- include graph

local job, run, logs = KEYS[1], KEYS[2], {}
for at = 3, #KEYS do logs[at - 2] = KEYS[at] end
local epoch, cap, sender = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local index, seq, task, envelope = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7]
local stamp, after, first_complete = ARGV[8], {}, 11 + tonumber(ARGV[10])
for at = 11, first_complete - 1 do after[at - 10] = ARGV[at] end

if not fenced(job, epoch, ARGV[9]) then return 3 end

local answer, counter = 0, 'q:' .. sender .. ':' .. index
if index > 0 then
    if task == '' then
        local last = tonumber(redis.call('HGET', run, counter) or '0')
        if seq <= last then answer = 1 end
    elseif redis.call('HEXISTS', run, 's:' .. task) == 1 then
        answer = 1
    end
    if answer == 0 and not has_room(run, index, cap) then return 4 end
end

if index > 0 and answer == 0 then
    if task == '' then
        append(run, logs, index, sender, seq, envelope, stamp)
        redis.call('HSET', run, counter, seq)
    else
        graph_create(run, logs, task, after, index, envelope, stamp)
    end
end
for at = first_complete, #ARGV do graph_complete(run, logs, ARGV[at], stamp) end
return answer
