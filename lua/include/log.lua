-- Log entries, their counts by run, and stamps of emulated runs: 'SECONDS NODE', the nominal time at which NODE sent something;
-- '' in any other run.

-- A run has a lifetime from its first entry and from its last commit on: if the job's record is deleted or damaged,
-- nobody knows the run's epoch, and so its key, when the job ends.
local RUN_MS = 86400000

local function counted(run, index)
    if redis.call('HINCRBY', run, 'a:' .. index, 1) == 1 then redis.call('PEXPIRE', run, RUN_MS) end
end

-- Append to the log of the worker index, and count the entry for the run: a:INDEX in its hash.
local function append(run, logs, index, sender, seq, envelope, stamp)
    local log = logs[tonumber(index)]
    if stamp == '' then
        redis.call('XADD', log, '*', 'f', sender, 'q', seq, 'm', envelope)
    else
        redis.call('XADD', log, '*', 'f', sender, 'q', seq, 'm', envelope, 't', stamp)
    end
    counted(run, index)
end

-- Append an entry with the messages of several runs, each counted for its run, and note its number there. parts:
-- list of run hash, seq and envelope.
local function append_together(log, index, sender, parts, stamp)
    local fields = { 'f', sender }
    if stamp ~= '' then fields[3], fields[4] = 't', stamp end
    for _, part in ipairs(parts) do
        local at = #fields
        fields[at + 1], fields[at + 2], fields[at + 3], fields[at + 4] = 'q', part.seq, 'm', part.envelope
        counted(part.run, index)
        redis.call('HSET', part.run, 'q:' .. sender .. ':' .. index, part.seq)
    end
    redis.call('XADD', log, '*', unpack(fields))
end

-- Whether another entry of the run may wait in the log of the worker index: its entries there less those that
-- have been read and removed, r:INDEX in its hash, are fewer than cap. Other runs' entries do not count.
local function has_room(run, index, cap)
    local found = redis.call('HMGET', run, 'a:' .. index, 'r:' .. index)
    return tonumber(found[1] or '0') - tonumber(found[2] or '0') < cap
end

local function seconds(stamp)
    return tonumber(string.match(stamp, '^%S+'))
end

-- The later of two stamps; the second if they are equal.
local function later(one, other)
    if one == '' or (other ~= '' and seconds(other) >= seconds(one)) then return other end
    return one
end
