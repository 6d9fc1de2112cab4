-- The ownership fence: whether the job runs under exactly this epoch.
local function fenced(job, epoch)
    local found = redis.call('HMGET', job, 'state', 'epoch')
    return found[1] == 'running' and found[2] == epoch
end
