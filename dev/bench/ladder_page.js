// ladder.html: shares or milliseconds, and the speed-up for each bandwidth of the network
'use strict';
(function () {
    var stacks = document.querySelectorAll('#phases .stack');
    var share = document.getElementById('as_share'), ms = document.getElementById('as_ms');
    function show(asShare) {
        stacks.forEach(function (stack) { stack.style.width = (asShare ? 100 : stack.dataset.ms) + '%'; });
        share.className = asShare ? 'on' : '';
        ms.className = asShare ? '' : 'on';
    }
    if (share) {
        share.onclick = function () { show(true); };
        ms.onclick = function () { show(false); };
    }

    var data = JSON.parse(document.getElementById('network_data').textContent);
    var svg = document.getElementById('scaling'), slider = document.getElementById('bandwidth');
    var most = 8, width = 560, height = 360, left = 46, bottom = 44;
    function x(ranks) { return left + (width - left - 14) * (ranks - 1) / (most - 1); }
    function y(speedup) { return 10 + (height - 10 - bottom) * (1 - speedup / most); }
    function draw(name, attributes, text) {
        var element = document.createElementNS('http://www.w3.org/2000/svg', name);
        for (var key in attributes) { element.setAttribute(key, attributes[key]); }
        if (text !== undefined) { element.textContent = text; }
        svg.appendChild(element);
        return element;
    }
    function dot(ranks, speedup, radius, fill, stroke, text) {
        var circle = draw('circle', {cx: x(ranks), cy: y(speedup), r: radius, fill: fill, stroke: stroke, 'stroke-width': 2});
        var title = document.createElementNS('http://www.w3.org/2000/svg', 'title');
        title.textContent = text;
        circle.appendChild(title);
    }
    function axes() {
        [1, 2, 3, 4, 6, 8].forEach(function (ranks) {
            draw('line', {x1: x(ranks), x2: x(ranks), y1: y(0), y2: y(most), stroke: '#e6e9ed'});
            draw('text', {x: x(ranks), y: height - 24, 'text-anchor': 'middle'}, ranks);
        });
        [0, 1, 2, 4, 6, 8].forEach(function (speedup) {
            draw('line', {x1: left, x2: width - 14, y1: y(speedup), y2: y(speedup), stroke: '#e6e9ed'});
            draw('text', {x: left - 6, y: y(speedup) + 4, 'text-anchor': 'end'}, speedup + 'x');
        });
        draw('text', {x: (left + width) / 2, y: height - 5, 'text-anchor': 'middle'}, 'cards');
        draw('line', {x1: x(1), y1: y(1), x2: x(most), y2: y(most), stroke: '#9aa3ad', 'stroke-dasharray': '5 4'});
    }
    function picture(at) {
        var table = '<tr><th>with 4 cards</th><th>speed-up</th><th>waiting</th><th>hours</th></tr>';
        svg.textContent = '';
        axes();
        Object.keys(at.ways).forEach(function (way) {
            var color = data.ways[way][0], points = at.ways[way];
            var corners = points.map(function (p) { return x(p.ranks) + ',' + y(p.speedup); }).join(' ');
            draw('polyline', {fill: 'none', stroke: color, 'stroke-width': 2.5, points: corners});
            points.forEach(function (p) {
                var speedup = p.speedup.toFixed(2) + 'x', hours = p.hours.toFixed(1), waiting = (100 * p.waiting).toFixed(0) + '%';
                dot(p.ranks, p.speedup, 3, color, color, p.ranks + ' cards: ' + speedup + ', ' + hours + ' h, waiting ' + waiting);
                if (p.ranks === 4) {
                    table += '<tr><td style="color:' + color + '">' + data.ways[way][1] + '</td><td class="n">' + speedup +
                        '</td><td class="n">' + waiting + '</td><td class="n">' + hours + '</td></tr>';
                }
            });
        });
        [[2.6, 'naive 2.6x'], [43 / 13.2, 'the last of 10: 3.3x']].forEach(function (told) {
            dot(4, told[0], 6, '#1f2933', '#fff', 'the reference run, ' + told[1]);
            draw('text', {x: x(4) + 12, y: y(told[0]) + 5}, told[1]);
        });
        data.measured.forEach(function (p) {
            dot(p.ranks, p.speedup, 6, '#fff', '#1f2933', p.title + ': ' + p.speedup.toFixed(2) + 'x');
        });
        document.getElementById('at4').innerHTML = table;
        document.getElementById('bandwidth_text').textContent = at.bandwidth + ' GB/s';
    }
    slider.value = data.scaling.findIndex(function (s) { return s.bandwidth === data.at; });
    slider.oninput = function () { picture(data.scaling[+slider.value]); };
    picture(data.scaling[+slider.value]);
    document.body.dataset.ready = 'yes';
}());
