-- mpv plays weft://HOST[:PORT]/NAME: with seeking, over the proxy of `weft media`, which runs as long as the title.
--
--   mpv --script=weft.lua weft://localhost/a.mp4
--
-- In ~/.config/mpv/scripts it is always there. --script-opts=weft-command='weft media' names the program, weft-options='--peer FINGERPRINT' gives
-- options of `weft media proxy`.

local options = { command = "weft media", options = "" }
require("mp.options").read_options(options, "weft")

-- How long the proxy may take to listen, in seconds: it connects first, and may ask for trust.
local PATIENCE = 30
local LOOK = 0.02

local proxy, said

local function stop()
    if proxy then
        mp.abort_async_command(proxy)
        proxy = nil
    end
    if said then
        os.remove(said)
        said = nil
    end
end

-- The address is in the line that the proxy says.
local function address()
    local file = io.open(said)
    local line = file and file:read("*l")
    if file then
        file:close()
    end
    return line and line:match("(http://[^/]+)/")
end

local function encode(name)
    return (name:gsub("[^%w%-%._~/]", function(byte)
        return ("%%%02X"):format(byte:byte())
    end))
end

mp.add_hook("on_load", 50, function(hook)
    local server, name = mp.get_property("stream-open-filename", ""):match("^weft://([^/]+)/(.+)$")
    if not server then
        return
    end
    stop()
    said = os.tmpname()
    local ended
    proxy = mp.command_native_async({
        name = "subprocess",
        playback_only = false,
        -- The program's own words may hold spaces; what is from the URL is a single argument.
        args = { "sh", "-c", 'out=$1; shift; exec ' .. options.command .. " proxy --http 127.0.0.1:0 "
            .. options.options .. ' -- "$1" >"$out"', "weft", said, server },
    }, function()
        ended = true
    end)
    hook:defer()
    local waited = 0
    local timer
    timer = mp.add_periodic_timer(LOOK, function()
        waited = waited + LOOK
        -- The user has gone on meanwhile, or the title has ended.
        if mp.get_property_bool("playback-abort") or not said then
            stop()
            timer:kill()
            hook:cont()
            return
        end
        local at = address()
        if at then
            -- A live stream is named without an ending, and a file never is.
            local live = not name:match("%.[^/]*$")
            local path = live and ("/hls/0/%s/index.m3u8"):format(encode(name)) or "/media/0/" .. encode(name)
            mp.set_property("stream-open-filename", at .. path)
        elseif not ended and waited < PATIENCE then
            return
        else
            mp.msg.error("`" .. options.command .. " proxy " .. server .. "` does not listen: see its message above")
            stop()
        end
        timer:kill()
        hook:cont()
    end)
end)

mp.register_event("end-file", stop)
mp.register_event("shutdown", stop)
