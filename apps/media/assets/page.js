'use strict';
// Lists what the servers have, plays it, seeks, and shows what that costs. Names come from servers: they are text, never markup.

const $ = (id) => document.getElementById(id);
const video = $('player');
let hls = null;
let current = null;
let last = null;

const path = (title) => `${title.server}/${title.name.split('/').map(encodeURIComponent).join('/')}`;
const notice = (text) => { $('notice').textContent = text; };

function size(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit++; }
  return `${bytes.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function clock(seconds) {
  if (!Number.isFinite(seconds)) return 'live';
  const s = Math.max(0, Math.floor(seconds));
  const parts = [Math.floor(s / 3600), Math.floor(s / 60) % 60, s % 60];
  const [h, m, sec] = parts.map((p) => String(p).padStart(2, '0'));
  return parts[0] ? `${parts[0]}:${m}:${sec}` : `${Number(m)}:${sec}`;
}

function card(title) {
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'title';
  button.dataset.name = title.name;
  let picture;
  if (title.picture) {
    picture = document.createElement('img');
    picture.loading = 'lazy';
    picture.alt = '';
    picture.src = `/media/${path({ server: title.server, name: title.picture })}`;
  } else if (!title.live && /\.(mp4|m4v|webm|mov|ogv)$/i.test(title.name)) {
    picture = document.createElement('video');
    picture.preload = 'metadata';
    picture.muted = true;
    picture.src = `/media/${path(title)}#t=1`;
  } else {
    picture = document.createElement('div');
    picture.className = 'blank';
    picture.textContent = title.live ? 'LIVE' : title.name.split('.').pop().toUpperCase();
  }
  const text = document.createElement('div');
  text.className = 'text';
  text.textContent = title.name;
  const small = document.createElement('small');
  small.textContent = title.live ? 'live' : size(title.size);
  if (title.live) small.className = 'live';
  if (title.label) small.textContent += ` · ${title.label}`;
  text.append(small);
  button.append(picture, text);
  button.addEventListener('click', () => open(title));
  return button;
}

async function list() {
  let servers;
  try {
    const response = await fetch('/api/titles');
    if (!response.ok) throw new Error(await response.text());
    servers = await response.json();
  } catch (e) {
    notice(`The list cannot be fetched: ${e.message}`);
    return;
  }
  const titles = servers.flatMap((s) => s.titles.map((t) => ({
    ...t, server: s.server, label: servers.length > 1 ? s.label : '',
  })));
  $('titles').replaceChildren(...titles.map(card));
  const wrong = servers.filter((s) => s.error && s.titles.length === 0);
  notice(wrong.map((s) => `${s.label}: ${s.error}`).join(' · ') || (titles.length ? '' : 'There are no titles.'));
  filter();
}

function filter() {
  const wanted = $('search').value.toLowerCase();
  for (const button of $('titles').children) {
    button.hidden = !button.dataset.name.toLowerCase().includes(wanted);
  }
}

async function open(title) {
  if (hls) { hls.destroy(); hls = null; }
  current = title;
  last = null;
  notice('');
  $('stage').hidden = false;
  $('now').textContent = title.name;
  for (const id of ['newest', 'delay-box', 'skipped-box']) $(id).hidden = !title.live;
  const playlist = `/hls/${path(title)}/index.m3u8`;
  // Fragmented files have a playlist: without one a browser does not know how long they are.
  const segmented = title.live
    || (/\.(mp4|m4v)$/i.test(title.name) && (await fetch(playlist)).ok);
  if (current !== title) return;
  if (segmented && window.Hls && Hls.isSupported()) {
    hls = new Hls({ enableWorker: false, liveSyncDurationCount: 2, maxBufferLength: 20 });
    hls.on(Hls.Events.ERROR, (_, data) => {
      if (!data.fatal) return;
      notice(`The stream cannot be played: ${data.details}`);
      if (data.type === Hls.ErrorTypes.NETWORK_ERROR) setTimeout(() => hls && hls.loadSource(playlist), 1000);
    });
    hls.loadSource(playlist);
    hls.attachMedia(video);
  } else {
    video.src = segmented ? playlist : `/media/${path(title)}`;
  }
  $('stage').scrollIntoView({ block: 'nearest' });
  video.play().catch(() => {});
}

function ahead() {
  for (let i = 0; i < video.buffered.length; i++) {
    if (video.buffered.start(i) <= video.currentTime + 0.3 && video.currentTime < video.buffered.end(i)) {
      return video.buffered.end(i);
    }
  }
  return video.currentTime;
}

function show() {
  $('play').textContent = video.paused ? 'Play' : 'Pause';
  $('mute').textContent = video.muted ? 'Sound' : 'Mute';
  $('time').textContent = `${clock(video.currentTime)} / ${clock(video.duration)}`;
  const end = Number.isFinite(video.duration) ? video.duration : ahead();
  if (end > 0) {
    if (document.activeElement !== $('bar') || !$('bar').matches(':active')) {
      $('bar').value = String(Math.round(1000 * video.currentTime / end));
    }
    $('buffered').style.width = `${Math.min(100, 100 * ahead() / end)}%`;
  }
  $('buffer').textContent = `${(ahead() - video.currentTime).toFixed(1)} s`;
  if (video.videoWidth) {
    const quality = video.getVideoPlaybackQuality();
    $('picture').textContent = `${video.videoWidth} × ${video.videoHeight}, ${quality.droppedVideoFrames} of ${quality.totalVideoFrames} frames dropped`;
  }
}

async function measure() {
  if (!current) return;
  const response = await fetch('/api/stats').catch(() => null);
  if (!response || !response.ok) return;
  const stats = await response.json();
  const now = performance.now();
  const bytes = stats.servers[current.server].bytes;
  $('bytes').textContent = size(bytes);
  if (last) $('rate').textContent = `${((bytes - last.bytes) * 8e-3 / (now - last.now)).toFixed(2)} Mbit/s`;
  last = { bytes, now };
  const feed = stats.feeds.find((f) => f.server === current.server && f.name === current.name);
  if (feed) {
    $('delay').textContent = `${(feed.delay_us / 1000).toFixed(1)} ms`;
    $('skipped').textContent = String(feed.skipped);
  }
}

const seek = (to) => {
  const end = Number.isFinite(video.duration) ? video.duration : ahead();
  video.currentTime = Math.min(Math.max(0, to), end);
};
$('play').addEventListener('click', () => (video.paused ? video.play().catch(() => {}) : video.pause()));
$('back').addEventListener('click', () => seek(video.currentTime - 10));
$('forward').addEventListener('click', () => seek(video.currentTime + 10));
$('mute').addEventListener('click', () => { video.muted = !video.muted; });
$('newest').addEventListener('click', () => { if (hls && hls.liveSyncPosition) video.currentTime = hls.liveSyncPosition; });
$('bar').addEventListener('input', () => {
  const end = Number.isFinite(video.duration) ? video.duration : ahead();
  seek(end * Number($('bar').value) / 1000);
});
$('search').addEventListener('input', filter);
for (const event of ['play', 'pause', 'timeupdate', 'seeked', 'progress', 'durationchange', 'volumechange']) {
  video.addEventListener(event, show);
}
video.addEventListener('error', () => { if (!hls && video.error) notice(`The title cannot be played: ${video.error.message || video.error.code}`); });
setInterval(measure, 1000);
list();
