-- The ownership fence: whether the job runs under exactly this epoch, and was assigned to exactly this holder, a role
-- and its generation ('verify-2:3'; '' for a worker without a lease, whose job was assigned without any).
local function fenced(job, epoch, holder)
    local found = redis.call('HMGET', job, 'state', 'epoch', 'holders')
    return found[1] == 'running' and found[2] == epoch
        and string.find(found[3] or '  ', ' ' .. holder .. ' ', 1, true) ~= nil
end
