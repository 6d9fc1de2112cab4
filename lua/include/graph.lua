-- The task graph of one job in one hash: the same structure as flowspec/core/protocol/graph.py. Needs include log.
-- Fields: d:TASK complete, its stamp; s:TASK known; n:TASK open dependencies; w:TASK names waiting for it, one
-- a line; t:TASK receiver's index in logs; p:TASK envelope; m:TASK latest stamp of its creation and of what it
-- waited for, if there is one: the stamp it is let go with. A task without an envelope is virtual.

local graph_complete

local function graph_deliver(job, graph, logs, index, envelope, stamp)
    local log = logs[tonumber(index)]
    local seq = redis.call('HINCRBY', job, 'q:graph:' .. index, 1)
    append(log, 'graph', seq, envelope, stamp)
end

local function graph_release(job, graph, logs, task, stamp)
    local found = redis.call('HMGET', graph, 't:' .. task, 'p:' .. task)
    redis.call('HDEL', graph, 'n:' .. task, 't:' .. task, 'p:' .. task, 'm:' .. task)
    if found[2] then
        graph_deliver(job, graph, logs, found[1], found[2], stamp)
        return false
    end
    return true
end

-- The latest stamp task has to wait for, stamp taken into account.
local function graph_latest(graph, task, stamp)
    if stamp == '' then return '' end
    local latest = later(redis.call('HGET', graph, 'm:' .. task) or '', stamp)
    redis.call('HSET', graph, 'm:' .. task, latest)
    return latest
end

graph_complete = function(job, graph, logs, first, stamp)
    local pending, stamps = {first}, {stamp}
    local at = 1
    while pending[at] do
        local task = pending[at]
        if redis.call('HSETNX', graph, 'd:' .. task, stamps[at]) == 1 then
            local waiting = redis.call('HGET', graph, 'w:' .. task)
            redis.call('HDEL', graph, 'w:' .. task)
            for dependent in string.gmatch(waiting or '', '[^\n]+') do
                local latest = graph_latest(graph, dependent, stamps[at])
                if redis.call('HINCRBY', graph, 'n:' .. dependent, -1) == 0
                    and graph_release(job, graph, logs, dependent, latest) then
                    pending[#pending + 1], stamps[#stamps + 1] = dependent, latest
                end
            end
        end
        at = at + 1
    end
end

-- after: list of task names; index and envelope '' for a virtual task. A known task is left as it is.
local function graph_create(job, graph, logs, task, after, index, envelope, stamp)
    if redis.call('HSETNX', graph, 's:' .. task, '1') == 0 then
        return
    end
    local open, seen, latest = 0, {}, stamp
    for _, name in ipairs(after) do
        local done = redis.call('HGET', graph, 'd:' .. name)
        if done then
            latest = later(done, latest)
        elseif not seen[name] then
            seen[name] = true
            open = open + 1
            local waiting = redis.call('HGET', graph, 'w:' .. name)
            redis.call('HSET', graph, 'w:' .. name, (waiting and waiting .. '\n' or '') .. task)
        end
    end
    if open > 0 then
        redis.call('HSET', graph, 'n:' .. task, open)
        if latest ~= '' then redis.call('HSET', graph, 'm:' .. task, latest) end
        if envelope ~= '' then
            redis.call('HSET', graph, 't:' .. task, index, 'p:' .. task, envelope)
        end
    elseif envelope ~= '' then
        graph_deliver(job, graph, logs, index, envelope, latest)
    else
        graph_complete(job, graph, logs, task, latest)
    end
end
