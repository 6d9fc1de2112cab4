-- Whether the time in the id of a stream's entry is later than latest, ms.
local function is_later(id, latest)
    return tonumber(string.match(id, '^%d+')) > latest
end
