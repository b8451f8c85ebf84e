-- bury.lua: a conversation was deleted. Of its hot data only a tombstone stays, for as long as a late writer
-- may come: a state with a version above every turn's. From here on each fenced script refuses.
--
-- KEYS    1 state  2 lock  3 … what else is deleted
-- ARGV    1 version  above all that were given out  2 ttl_ms of the tombstone
-- Returns 1

local version = string.find(ARGV[1] or '', '^%d+$') and tonumber(ARGV[1])
local ttl_ms = string.find(ARGV[2] or '', '^%d+$') and tonumber(ARGV[2])
if string.sub(KEYS[1] or '', -6) ~= ':state' or string.sub(KEYS[2] or '', -5) ~= ':lock' then
  return redis.error_reply('INPUT state or lock key')
end
if not version or not ttl_ms or ttl_ms < 1 then return redis.error_reply('INPUT version or ttl') end
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'hash' then
  return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' holds a ' .. kind)
end

local known = tonumber(redis.call('HGET', KEYS[1], 'version') or '0') or 0
for _, key in ipairs(KEYS) do redis.call('DEL', key) end
redis.call('HSET', KEYS[1], 'version', string.format('%.0f', math.max(known, version)), 'deleted', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
