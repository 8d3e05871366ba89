// Renders components, each in a frame of its own without scripts and without a network, and checks what is there.
// verify([{html, spec, expected}]) -> Promise of [{checks: {name: bool}, html: as the browser understood it}]
// A frame is a document of its own: what one component leaves open, styles or positions cannot reach another.
(() => {
  const WIDTH = 340, HEIGHT = 240, CONTRAST = 4.5;  // WCAG 2.2, 1.4.3
  const POLICY = "default-src 'none'; style-src 'unsafe-inline'";
  const HEAD = `<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="${POLICY}">` +
    "<style>body{margin:8px;background:white;color:black;font:16px sans-serif}</style><body>";
  const flat = (text) => text.replace(/\s+/g, " ").trim();

  function frameOf(html, width = WIDTH, height = HEIGHT) {
    const frame = document.createElement("iframe");
    frame.sandbox = "allow-same-origin";  // and so no scripts, no forms, no navigation
    frame.style.cssText = `border:0;width:${width}px;height:${height}px`;
    frame.srcdoc = HEAD + html;
    const loaded = new Promise((done) => { frame.onload = () => done(frame); });
    return [frame, loaded];
  }

  // ---- colours

  function rgba(text) {
    const parts = /^rgba?\(([^)]+)\)$/.exec(text);
    if (!parts) return null;  // a form that is not plain: nothing is known of it
    const [r, g, b, a = 1] = parts[1].split(",").map(Number);
    return [r, g, b, a];
  }

  const over = (top, alpha, below) => top.slice(0, 3).map((value, k) => alpha * value + (1 - alpha) * below[k]);

  function luminance(colour) {
    const [r, g, b] = colour.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function ratio(one, other) {
    const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  }

  // [colour of the text, of what is behind it], as painted; null where this is not plain colours on each other.
  function painted(element) {
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.unshift(at);
    let behind = [255, 255, 255], alpha = 1;
    for (const one of chain) {
      const style = getComputedStyle(one), ground = rgba(style.backgroundColor);
      const plain = style.backgroundImage === "none" && style.filter === "none" && style.maskImage === "none" &&
        style.mixBlendMode === "normal";
      if (!ground || !plain) return null;
      alpha *= Number(style.opacity);
      behind = over(ground, ground[3] * alpha, behind);
    }
    const ink = rgba(getComputedStyle(element).webkitTextFillColor);
    return ink && [over(ink, ink[3] * alpha, behind), behind];
  }

  // ---- what is seen

  function textsUnder(root) {
    const walker = root.ownerDocument.createTreeWalker(root, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) if (flat(walker.currentNode.data)) found.push(walker.currentNode);
    return found;
  }

  // Every line of a text is where a pointer meets it, within the frame, in letters that can be read.
  function seen(text) {
    const holder = text.parentElement, range = holder.ownerDocument.createRange();
    range.selectNodeContents(text);
    const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
    const shown = holder.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    return shown && boxes.length > 0 && parseFloat(getComputedStyle(holder).fontSize) >= 9 && boxes.every((box) => {
      const inside = box.left >= 0 && box.top >= 0 && box.right <= WIDTH && box.bottom <= HEIGHT && box.height >= 8;
      const places = [0.1, 0.5, 0.9].map((share) => [box.left + share * box.width, box.top + box.height / 2]);
      return inside && places.every(([x, y]) => holder.ownerDocument.elementFromPoint(x, y) === holder);
    });
  }

  const accepted = (element) => (element.getAttribute("style") ?? "").split(";").filter(flat).every((one) =>
    element.style.getPropertyValue(one.split(":")[0].trim().toLowerCase()) !== "");

  // ---- the checks of one component

  function checks(body, spec, expected) {
    const roots = [...body.children], root = roots[0];
    const loose = [...body.childNodes].some((node) => node.nodeType !== 1 && flat(node.textContent));
    const found = { renders: false };
    if (roots.length !== 1 || loose) return found;
    const all = [root, ...root.querySelectorAll("*")], box = root.getBoundingClientRect();
    const parts = expected.parts ? [...root.querySelectorAll(expected.parts)] : [root];
    const texts = textsUnder(root), style = getComputedStyle(root);
    const sized = expected.input ? root.querySelector("input") : root;
    found.renders = box.width >= 8 && box.height >= 8 && box.width <= WIDTH && box.height <= HEIGHT;
    found.style = all.every(accepted);
    found.elements = root.matches(expected.root) && root.querySelectorAll("input").length === (expected.input ? 1 : 0) &&
      parts.length === (expected.parts ? spec.texts.length : 1) &&
      all.every((one) => expected.allowed.includes(one.localName));
    found.texts = JSON.stringify(parts.map((one) => flat(one.textContent))) === JSON.stringify(spec.texts) &&
      flat(texts.map((one) => one.data).join(" ")) === spec.texts.join(" ");
    found.visible = texts.length > 0 && texts.every(seen);
    found.contrast = texts.every((one) => {
      const both = painted(one.parentElement);
      return both !== null && ratio(...both) >= CONTRAST;
    });
    if (spec.colour) {
      const behind = painted(root)?.[1] ?? [];
      const asked = rgba(expected.colour);
      found.colour = behind.every((value, k) => Math.abs(value - asked[k]) < 1) && behind.length === 3 &&
        texts.every((one) => String(painted(one.parentElement)?.[1]) === String(behind));
    }
    if (spec.width) {
      const width = parseFloat(sized ? getComputedStyle(sized).width : "");
      const grown = root.localName === "table" && root.style.width === `${spec.width}px` && width > spec.width;
      found.width = Math.abs(width - spec.width) <= 1 || grown;  // a table grows to what its cells need
    }
    if (spec.size) found.size = Math.abs(parseFloat(style.fontSize) - expected.pixels) <= 1;
    found.fits = all.every((one) => {
      const own = one.getBoundingClientRect();
      const within = style.display === "inline" || (own.left >= box.left - 1 && own.right <= box.right + 1 &&
        own.top >= box.top - 1 && own.bottom <= box.bottom + 1);
      return within && own.right <= WIDTH && own.bottom <= HEIGHT && (one.localName === "input" || !one.clientWidth || one.scrollWidth <= one.clientWidth + 1);
    });
    found.accessible = named(root, parts, spec, expected);
    return found;
  }

  // Roles and names as the browser gives them to a screen reader.
  function named(root, parts, spec, expected) {
    const controls = expected.input ? [root.querySelector("input")] : expected.named ? parts : [];
    const roles = expected.roles.every(([selector, role]) => {
      const some = [root, ...root.querySelectorAll("*")].filter((one) => one.matches(selector));
      return some.length > 0 && some.every((one) => one.computedRole === role);
    });
    return roles && controls.every((one, k) => one && flat(one.computedName) === spec.texts[k]);
  }

  async function verify(items) {
    const frames = items.map((item) => frameOf(item.html));
    document.body.replaceChildren(...frames.map(([frame]) => frame));
    try {
      const loaded = await Promise.all(frames.map(([, loading]) => loading));
      return loaded.map((frame, k) => {
        const body = frame.contentDocument.body;
        return { checks: checks(body, items[k].spec, items[k].expected), html: body.innerHTML };
      });
    } finally {
      document.body.replaceChildren();
    }
  }

  // A sheet of components with what was asked for above each: [{html, title, good}], ``columns`` beside each other.
  async function sheet(items, columns, width, height) {
    const cells = items.map((item) => {
      const cell = document.createElement("figure"), title = document.createElement("figcaption");
      const [frame, loaded] = frameOf(item.html, width - 2, height - 24);
      title.textContent = `${item.good ? "\u2713" : "\u2717"} ${item.title}`;
      title.style.cssText = `font:12px sans-serif;height:22px;line-height:22px;padding:0 6px;overflow:hidden;` +
        `white-space:nowrap;color:${item.good ? "#0a6b2d" : "#a8071a"};background:#f2f2f2`;
      cell.style.cssText = "margin:0;border:1px solid #ccc;background:white";
      cell.append(title, frame);
      return [cell, loaded];
    });
    document.body.style.cssText =
      `margin:0;display:grid;grid-template-columns:repeat(${columns},${width}px);background:white`;
    document.body.replaceChildren(...cells.map(([cell]) => cell));
    await Promise.all(cells.map(([, loaded]) => loaded));
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  }

  globalThis.components = { verify, sheet };
  return true;
})()
