// Small pieces of the page: labelled buttons and choices, always filled as text.

export function element(document, name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(document, text, label, onClick) {
  const made = element(document, "button", "tl-button", text);
  made.type = "button";
  made.title = label;
  made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

// options: [[value, text]]; returns {box, set(value)}
export function choice(document, name, options, value, onChange) {
  const box = element(document, "label", "tl-choice");
  box.append(element(document, "span", "", name));
  const select = element(document, "select");
  for (const [key, text] of options) {
    const option = element(document, "option", "", text);
    option.value = key;
    select.append(option);
  }
  select.value = value;
  select.addEventListener("change", () => onChange(select.value));
  box.append(select);
  return {
    box,
    set: (key) => {
      select.value = key;
    },
  };
}
