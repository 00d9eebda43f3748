// The charts, and what keeps the page up to date. Everything else works without this script.
"use strict";
(() => {
	const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
	const seconds = (s) => s * 1000;
	const utc = (ts) => uPlot.tzDate(new Date(ts * 1e3), "Etc/UTC");
	const number = new Intl.NumberFormat("en", {maximumFractionDigits: 2});
	const two = (n) => String(n).padStart(2, "0");
	const months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

	// when writes an instant, with as much of it as a chart of this length needs.
	const when = (ts, span) => {
		const d = utc(ts);
		const clock = two(d.getHours()) + ":" + two(d.getMinutes()) + (span < 600 ? ":" + two(d.getSeconds()) : "");
		const day = d.getDate() + " " + months[d.getMonth()];
		return span < 86400 * 1.5 ? clock : span > 86400 * 60 ? day + " " + d.getFullYear() : clock === "00:00" ? day : day + " " + clock;
	};

	function axes(height) {
		const font = "11px " + css("--sans");
		const line = {stroke: css("--line"), width: 1};
		return [{
			font, stroke: css("--muted"), grid: {show: false}, ticks: {...line, size: 4}, size: 26, gap: 3, space: 74,
			values: (u, ticks) => ticks.map((t) => when(t, u.scales.x.max - u.scales.x.min)),
		}, {
			font, stroke: css("--muted"), grid: line, ticks: {show: false}, gap: 6, space: height > 150 ? 40 : 28,
			size: (u, values) => values ? 14 + 7 * Math.max(...values.map((v) => v.length)) : 40,
			values: (u, ticks) => ticks.map((t) => number.format(t)),
		}];
	}

	const bars = (bin) => uPlot.paths.bars({size: [0.82, 60], align: 1, gap: 0, radius: 0});

	// Each kind of chart: its columns, and its options. Denials stand on the grants: the column of both is drawn first.
	const kinds = {
		usage(el, s) {
			const sum = s.data[1].map((g, i) => g + s.data[2][i]);
			return {
				data: [s.data[0], sum, s.data[1]],
				end: s.bin,
				series: [
					{fill: css("--accent"), width: 0, paths: bars(), points: {show: false}},
					{fill: css("--granted"), width: 0, paths: bars(), points: {show: false}},
				],
				tip: (i) => [when(s.data[0][i], s.bin * s.data[0].length), number.format(s.data[2][i]) + " denied", number.format(s.data[1][i]) + " granted"],
				floor: 4,
			};
		},
		hours(el, s) {
			return {
				data: [s.data[0], s.data[2]],
				end: s.bin,
				series: [{fill: css("--accent"), width: 0, paths: bars(), points: {show: false}}],
				tip: (i) => [when(s.data[0][i], 172800), number.format(s.data[2][i]) + " denied"],
				floor: 4,
			};
		},
		curve(el, s) {
			return {
				data: s.data,
				end: 0,
				series: [{stroke: css("--ink"), width: 1.5, fill: css("--wash"), points: {show: false}, paths: s.steps ? uPlot.paths.stepped({align: 1}) : undefined}],
				tip: (i) => [when(s.data[0][i], s.data[0].at(-1) - s.data[0][0]), number.format(s.data[1][i]) + " tokens"],
				floor: s.capacity,
				now: s.now,
				capacity: s.capacity,
			};
		},
	};

	function chart(el) {
		let made = null, plot = null;
		const tip = document.createElement("div");
		tip.className = "tip";
		tip.hidden = true;
		const height = () => el.classList.contains("low") ? 120 : 210;

		function parse() {
			const s = el.dataset.series ? JSON.parse(el.dataset.series) : null;
			el.hidden = !s;
			return s;
		}
		// Lines that belong to no series: now, and the capacity.
		function lines(u) {
			const ctx = u.ctx, left = u.bbox.left, top = u.bbox.top, dpr = devicePixelRatio;
			ctx.save();
			ctx.lineWidth = dpr;
			ctx.font = 11 * dpr + "px " + css("--sans");
			if (made.capacity !== undefined) {
				const y = Math.round(u.valToPos(made.capacity, "y", true)) + 0.5;
				ctx.strokeStyle = css("--muted");
				ctx.setLineDash([3 * dpr, 3 * dpr]);
				ctx.beginPath(); ctx.moveTo(left, y); ctx.lineTo(left + u.bbox.width, y); ctx.stroke();
			}
			if (made.now !== undefined) {
				const x = Math.round(u.valToPos(made.now, "x", true)) + 0.5;
				ctx.strokeStyle = css("--accent");
				ctx.setLineDash([]);
				ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + u.bbox.height); ctx.stroke();
				ctx.fillStyle = css("--accent");
				const right = x < left + u.bbox.width - 40 * dpr;
				ctx.textAlign = right ? "left" : "right";
				ctx.strokeStyle = css("--surface");
				ctx.lineJoin = "round";
				ctx.lineWidth = 4 * dpr;
				ctx.strokeText("now", x + (right ? 5 : -5) * dpr, top + 28 * dpr);
				ctx.fillText("now", x + (right ? 5 : -5) * dpr, top + 28 * dpr);
			}
			ctx.restore();
		}
		function hover(u) {
			const i = u.cursor.idx;
			if (i == null || u.cursor.left < 0) {
				tip.hidden = true;
				return;
			}
			tip.replaceChildren(...made.tip(i).map((text) => {
				const line = document.createElement("div");
				line.textContent = text;
				return line;
			}));
			tip.hidden = false;
			const wide = u.over.clientWidth, own = tip.offsetWidth;
			const x = u.cursor.left + own + 16 > wide ? u.cursor.left - own - 12 : u.cursor.left + 12;
			tip.style.left = Math.max(0, Math.min(x, wide - own)) + "px";
			tip.style.top = "8px";
		}
		function build() {
			plot?.destroy();
			plot = null;
			const s = parse();
			if (!s) {
				return;
			}
			made = kinds[el.dataset.kind](el, s);
			plot = new uPlot({
				width: Math.max(el.clientWidth, 200), height: height(), tzDate: utc, legend: {show: false}, padding: [10, 18, 0, 0], pxAlign: el.dataset.kind === "curve" ? 0 : 1,
				cursor: {y: false, points: {show: false}, drag: {x: false, y: false}},
				scales: {
					x: {time: true, range: (u, min, max) => [min, max + made.end]},
					y: {range: (u, min, max) => [Math.min(0, min), Math.max(max * 1.06, made.floor)]},
				},
				axes: axes(height()),
				series: [{}, ...made.series],
				hooks: {draw: [lines], setCursor: [hover]},
			}, made.data, el);
			plot.over.append(tip);
		}
		function update() {
			const s = parse();
			if (!s || !plot) {
				build();
				return;
			}
			made = kinds[el.dataset.kind](el, s);
			plot.setData(made.data);
		}
		build();
		new ResizeObserver(() => plot?.setSize({width: Math.max(el.clientWidth, 200), height: height()})).observe(el);
		matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
		el.update = update;
	}

	// repeat calls a function again and again while the page is seen. The pauses are at least nine times as long as the calls.
	function repeat(pause, call) {
		const stale = document.getElementById("stale");
		let failures = 0;
		const again = async () => {
			const begin = performance.now();
			if (!document.hidden) {
				try {
					await call();
					failures = 0;
				} catch (err) {
					failures++;
				}
				stale.hidden = failures < 2;
			}
			setTimeout(again, Math.max(pause * Math.min(2 ** failures, 16), 9 * (performance.now() - begin)));
		};
		setTimeout(again, pause);
	}

	async function get(url) {
		const answer = await fetch(url, {cache: "no-store", redirect: "error", signal: AbortSignal.timeout(15000)});
		if (!answer.ok) {
			throw new Error(String(answer.status));
		}
		return answer;
	}

	// used says whether somebody is about to press, read out or copy something in a part of the page.
	const used = (part) => part.contains(document.activeElement) || part.querySelector(":active, details[open]") || !getSelection().isCollapsed && part.contains(getSelection().anchorNode);

	// What is alive on the page is taken from a new copy of it.
	async function refresh() {
		const copy = new DOMParser().parseFromString(await (await get(location.href)).text(), "text/html");
		for (const part of document.querySelectorAll("[data-live]")) {
			const fresh = copy.getElementById(part.id);
			if (fresh && !used(part) && part.outerHTML !== fresh.outerHTML) {
				part.replaceWith(document.adoptNode(fresh));
			}
		}
		for (const part of document.querySelectorAll("[data-live-data]")) {
			const fresh = copy.getElementById(part.id);
			if (fresh && fresh.dataset.series !== part.dataset.series) {
				part.dataset.series = fresh.dataset.series;
				part.update();
			}
		}
	}

	document.querySelectorAll(".plot").forEach(chart);
	const live = document.querySelector(".plot[data-src]");
	if (live) {
		repeat(seconds(1), async () => {
			const series = await (await get(live.dataset.src)).text();
			if (series !== live.dataset.series) {
				live.dataset.series = series;
				live.update();
			}
		});
	}
	const every = Number(document.body.dataset.refresh);
	if (every) {
		repeat(seconds(every), refresh);
	}

	// The address says once what was done. A page that is loaded again does not say it again.
	const address = new URL(location.href);
	if (address.searchParams.has("done")) {
		address.searchParams.delete("done");
		history.replaceState(null, "", address);
	}
	// A form is sent once, however often its button is pressed.
	document.addEventListener("submit", (event) => {
		const button = event.target.method === "post" && event.target.querySelector("button");
		if (button) {
			if (button.classList.contains("busy")) {
				event.preventDefault();
			}
			button.classList.add("busy");
		}
	});
	addEventListener("pageshow", () => document.querySelectorAll("button.busy").forEach((b) => b.classList.remove("busy")));
})();
