-- The task graph of one job in one hash: the same structure as flowspec/core/protocol/graph.py. Needs include log.
-- Fields: d:TASK complete, its stamp; s:TASK known; n:TASK open dependencies; w:TASK names waiting for it, one
-- per line; t:TASK receiver's index in logs; p:TASK envelope; m:TASK the latest of its creation's and its
-- dependencies' stamps, if any, with which it is released.

local function graph_deliver(run, logs, index, envelope, stamp)
    local seq = redis.call('HINCRBY', run, 'q:graph:' .. index, 1)
    append(run, logs, index, 'graph', seq, envelope, stamp)
end

local function graph_release(run, logs, task, stamp)
    local found = redis.call('HMGET', run, 't:' .. task, 'p:' .. task)
    redis.call('HDEL', run, 'n:' .. task, 't:' .. task, 'p:' .. task, 'm:' .. task)
    graph_deliver(run, logs, found[1], found[2], stamp)
end

-- Update the task's latest stamp with stamp, and return it.
local function graph_latest(run, task, stamp)
    local before = redis.call('HGET', run, 'm:' .. task) or ''
    if stamp == '' then return before end
    local latest = later(before, stamp)
    redis.call('HSET', run, 'm:' .. task, latest)
    return latest
end

local function graph_complete(run, logs, task, stamp)
    if redis.call('HSETNX', run, 'd:' .. task, stamp) == 0 then return end
    local waiting = redis.call('HGET', run, 'w:' .. task)
    redis.call('HDEL', run, 'w:' .. task)
    for dependent in string.gmatch(waiting or '', '[^\n]+') do
        local latest = graph_latest(run, dependent, stamp)
        if redis.call('HINCRBY', run, 'n:' .. dependent, -1) == 0 then
            graph_release(run, logs, dependent, latest)
        end
    end
end

-- after: list of task names. The task must not be known.
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
        redis.call('HSET', run, 't:' .. task, index, 'p:' .. task, envelope)
    else
        graph_deliver(run, logs, index, envelope, latest)
    end
end
