-- Wake the scheduler: a job was admitted or has ended.
local function wake(log, event, job)
    redis.call('XADD', log, 'MAXLEN', '~', 100, '*', event, job)
end
