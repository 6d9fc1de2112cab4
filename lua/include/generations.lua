-- Generations: a hash with the number of every role's latest claim (ROLE), the token that made it (by:ROLE), and
-- the number of the latest holder that left the role on purpose (left:ROLE).

-- Whether every holder in the text holders ('draft:2 verify-1:1 ') is the latest to have claimed its role.
local function current(generations, holders)
    for role, generation in string.gmatch(holders, '(%S+):(%d+)') do
        if (redis.call('HGET', generations, role) or '0') ~= generation then return false end
    end
    return true
end

-- Whether the holder left its role on purpose; '': there is none.
local function has_left(generations, holder)
    local role, generation = string.match(holder, '(%S+):(%d+)')
    return role ~= nil and redis.call('HGET', generations, 'left:' .. role) == generation
end
