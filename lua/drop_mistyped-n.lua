-- drop_mistyped: delete keys that hold another type than their name says. Anybody may write such a key in the place of
-- one of the pipeline's; every command on it fails, where one that was deleted is made anew.
--
-- KEYS[1..] keys
-- ARGV[1..] the type of each, as TYPE says it
-- returns   OK, DUP (there was none)

local wrong = {}
for at, key in ipairs(KEYS) do
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= ARGV[at] then wrong[#wrong + 1] = key end
end
if #wrong == 0 then return 1 end

redis.call('DEL', unpack(wrong))
return 0
