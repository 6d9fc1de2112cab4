-- publish_together: deliver messages of several runs to one worker as one entry of its log. Each part has its own
-- fence, sequence number and room, as in publish; the entry holds those that pass.
--
-- KEYS[1]   log of the receiver
-- KEYS[2..] by part: job hash, run hash (sequence numbers and task graph)
-- ARGV[1]   cap: entries of a run that may wait in a log
-- ARGV[2]   sender
-- ARGV[3]   receiver's index in the pipeline's order (d0, s1, .., sN, m1, ..), from 1
-- ARGV[4]   stamp of an emulated run, '' in any other
-- ARGV[5]   the caller as a holder
-- ARGV[6..] by part: epoch, sequence number, envelope
-- returns   by part: OK, DUP, STALE, FULL

-- include fence
-- include log

local log, cap, sender, index, stamp = KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local counter, answers, passed = 'q:' .. sender .. ':' .. index, {}, {}

local function checked(job, run, epoch, seq)
    if not fenced(job, epoch, ARGV[5]) then return 3 end
    if tonumber(seq) <= tonumber(redis.call('HGET', run, counter) or '0') then return 1 end
    if not has_room(run, index, cap) then return 4 end
    return 0
end

for part = 1, (#KEYS - 1) / 2 do
    local job, run, first = KEYS[2 * part], KEYS[2 * part + 1], 3 * part + 3
    answers[part] = checked(job, run, ARGV[first], ARGV[first + 1])
    if answers[part] == 0 then
        passed[#passed + 1] = { run = run, seq = ARGV[first + 1], envelope = ARGV[first + 2] }
    end
end
if #passed > 0 then append_together(log, index, sender, passed, stamp) end
return answers
