-- read.lua: several plain reads as one consistent view, in one round trip. Writes nothing.
--
-- KEYS    one for each read
-- ARGV    for each read: command, number of its arguments, the arguments (after the key)
-- Returns the answers, in the order of KEYS

local PLAIN = { HGETALL = true, HGET = true, GET = true, LRANGE = true, SMEMBERS = true, ZRANGE = true,
  XRANGE = true, EXISTS = true }

local answers, at = {}, 1
for i, key in ipairs(KEYS) do
  local command, argc = ARGV[at], tonumber(ARGV[at + 1])
  if not PLAIN[command] or not argc then
    return redis.error_reply('INPUT ' .. tostring(command) .. ' is no plain read')
  end
  answers[i] = redis.call(command, key, unpack(ARGV, at + 2, at + 1 + argc))
  at = at + 2 + argc
end
return answers
