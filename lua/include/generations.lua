-- Generations: a hash with the number of every role's latest claim (ROLE), and the token that made it (by:ROLE).

-- Whether every holder in the text holders ('draft:2 verify-1:1 ') is the latest to have claimed its role.
local function current(generations, holders)
    for role, generation in string.gmatch(holders, '(%S+):(%d+)') do
        if (redis.call('HGET', generations, role) or '0') ~= generation then return false end
    end
    return true
end
