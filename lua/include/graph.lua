-- The task graph of one job in one hash: the same structure as flowspec/core/protocol/graph.py. Needs include log.
-- Fields: d:TASK complete, its stamp; s:TASK known; n:TASK open dependencies; w:TASK names waiting for it, one
-- per line; t:TASK receiver's index in logs; p:TASK envelope; m:TASK the latest of its creation's and its
-- dependencies' stamps, if any, with which it is released. A task without an envelope is virtual.

local graph_complete

local function graph_deliver(run, logs, index, envelope, stamp)
    local log = logs[tonumber(index)]
    local seq = redis.call('HINCRBY', run, 'q:graph:' .. index, 1)
    append(log, 'graph', seq, envelope, stamp)
end

local function graph_release(run, logs, task, stamp)
    local found = redis.call('HMGET', run, 't:' .. task, 'p:' .. task)
    redis.call('HDEL', run, 'n:' .. task, 't:' .. task, 'p:' .. task, 'm:' .. task)
    if found[2] then
        graph_deliver(run, logs, found[1], found[2], stamp)
        return false
    end
    return true
end

-- Update the task's latest stamp with stamp, and return it.
local function graph_latest(run, task, stamp)
    local before = redis.call('HGET', run, 'm:' .. task) or ''
    if stamp == '' then return before end
    local latest = later(before, stamp)
    redis.call('HSET', run, 'm:' .. task, latest)
    return latest
end

graph_complete = function(run, logs, first, stamp)
    local pending, stamps = {first}, {stamp}
    local at = 1
    while pending[at] do
        local task = pending[at]
        if redis.call('HSETNX', run, 'd:' .. task, stamps[at]) == 1 then
            local waiting = redis.call('HGET', run, 'w:' .. task)
            redis.call('HDEL', run, 'w:' .. task)
            for dependent in string.gmatch(waiting or '', '[^\n]+') do
                local latest = graph_latest(run, dependent, stamps[at])
                if redis.call('HINCRBY', run, 'n:' .. dependent, -1) == 0
                    and graph_release(run, logs, dependent, latest) then
                    pending[#pending + 1], stamps[#stamps + 1] = dependent, latest
                end
            end
        end
        at = at + 1
    end
end

-- after: list of task names; index and envelope '' for a virtual task. The task must not be known.
local function graph_create(run, logs, task, after, index, envelope, stamp)
    redis.call('HSET', run, 's:' .. task, '1')
    local open, latest = 0, stamp
    for _, name in ipairs(after) do
        local done = redis.call('HGET', run, 'd:' .. name)
        if done then
            latest = later(done, latest)
        else
            open = open + 1
            local waiting = redis.call('HGET', run, 'w:' .. name)
            redis.call('HSET', run, 'w:' .. name, (waiting and waiting .. '\n' or '') .. task)
        end
    end
    if open > 0 then
        redis.call('HSET', run, 'n:' .. task, open)
        if latest ~= '' then redis.call('HSET', run, 'm:' .. task, latest) end
        if envelope ~= '' then
            redis.call('HSET', run, 't:' .. task, index, 'p:' .. task, envelope)
        end
    elseif envelope ~= '' then
        graph_deliver(run, logs, index, envelope, latest)
    else
        graph_complete(run, logs, task, latest)
    end
end
