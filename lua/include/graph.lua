-- The task graph of one job in one hash: the same structure as flowspec/core/graph.py.
-- Fields: d:TASK complete; s:TASK known; n:TASK open dependencies; w:TASK names waiting for it, one a line;
-- t:TASK receiver's index in logs; p:TASK envelope. A task without an envelope is virtual.

local graph_complete

local function graph_deliver(job, graph, logs, index, envelope)
    local log = logs[tonumber(index)]
    local seq = redis.call('HINCRBY', job, 'q:graph:' .. index, 1)
    redis.call('XADD', log, '*', 'f', 'graph', 'q', seq, 'm', envelope)
end

local function graph_release(job, graph, logs, task)
    local found = redis.call('HMGET', graph, 't:' .. task, 'p:' .. task)
    redis.call('HDEL', graph, 'n:' .. task, 't:' .. task, 'p:' .. task)
    if found[2] then
        graph_deliver(job, graph, logs, found[1], found[2])
        return false
    end
    return true
end

graph_complete = function(job, graph, logs, first)
    local pending = {first}
    local at = 1
    while pending[at] do
        local task = pending[at]
        at = at + 1
        if redis.call('HSETNX', graph, 'd:' .. task, '1') == 1 then
            local waiting = redis.call('HGET', graph, 'w:' .. task)
            redis.call('HDEL', graph, 'w:' .. task)
            for dependent in string.gmatch(waiting or '', '[^\n]+') do
                if redis.call('HINCRBY', graph, 'n:' .. dependent, -1) == 0
                    and graph_release(job, graph, logs, dependent) then
                    pending[#pending + 1] = dependent
                end
            end
        end
    end
end

-- after: list of task names; index and envelope '' for a virtual task. A known task is left as it is.
local function graph_create(job, graph, logs, task, after, index, envelope)
    if redis.call('HSETNX', graph, 's:' .. task, '1') == 0 then
        return
    end
    local open, seen = 0, {}
    for _, name in ipairs(after) do
        if not seen[name] and redis.call('HEXISTS', graph, 'd:' .. name) == 0 then
            seen[name] = true
            open = open + 1
            local waiting = redis.call('HGET', graph, 'w:' .. name)
            redis.call('HSET', graph, 'w:' .. name, (waiting and waiting .. '\n' or '') .. task)
        end
    end
    if open > 0 then
        redis.call('HSET', graph, 'n:' .. task, open)
        if envelope ~= '' then
            redis.call('HSET', graph, 't:' .. task, index, 'p:' .. task, envelope)
        end
    elseif envelope ~= '' then
        graph_deliver(job, graph, logs, index, envelope)
    else
        graph_complete(job, graph, logs, task)
    end
end
