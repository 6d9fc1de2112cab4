-- Log entries, and stamps of emulated runs: 'SECONDS NODE', the nominal time at which NODE sent something;
-- '' in any other run.

local function append(log, sender, seq, envelope, stamp)
    if stamp == '' then
        redis.call('XADD', log, '*', 'f', sender, 'q', seq, 'm', envelope)
    else
        redis.call('XADD', log, '*', 'f', sender, 'q', seq, 'm', envelope, 't', stamp)
    end
end

local function seconds(stamp)
    return tonumber(string.match(stamp, '^%S+'))
end

-- The later of two stamps; the second if they are equal.
local function later(one, other)
    if one == '' or (other ~= '' and seconds(other) >= seconds(one)) then return other end
    return one
end
