// The editor: CodeMirror, with the colours of the page (lab.css).
import { python } from "@codemirror/lang-python";
import { HighlightStyle, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { indentWithTab } from "@codemirror/commands";
import { StateEffect, StateField } from "@codemirror/state";
import { Decoration, keymap } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { basicSetup, EditorView } from "codemirror";

const colours = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.self], class: "code-keyword" },
  { tag: [tags.string, tags.special(tags.string)], class: "code-string" },
  { tag: tags.comment, class: "code-comment" },
  { tag: [tags.number, tags.bool, tags.null], class: "code-number" },
  { tag: [tags.definition(tags.variableName), tags.function(tags.definition(tags.variableName)), tags.className], class: "code-name" },
]);

const setWrong = StateEffect.define(); // the number of a line, or null
const wrongLine = StateField.define({
  create: () => Decoration.none,
  update(marks, transaction) {
    for (const effect of transaction.effects) {
      if (!effect.is(setWrong)) continue;
      const { doc } = transaction.state;
      const isThere = effect.value !== null && effect.value <= doc.lines;
      return isThere ? Decoration.set(Decoration.line({ class: "wrong-line" }).range(doc.line(effect.value).from)) : Decoration.none;
    }
    return transaction.docChanged ? Decoration.none : marks;
  },
  provide: (field) => EditorView.decorations.from(field),
});

export function newEditor(parent, onChange, onRun) {
  const view = new EditorView({
    parent,
    extensions: [
      keymap.of([{ key: "Ctrl-Enter", mac: "Cmd-Enter", run: () => (onRun(), true) }]),
      basicSetup,
      keymap.of([indentWithTab]),
      python(),
      indentUnit.of("    "),
      syntaxHighlighting(colours),
      wrongLine,
      EditorView.lineWrapping,
      EditorView.cspNonce.of("lab"), // its style sheet; style attributes are Chromium's own, when one types
      EditorView.contentAttributes.of({ "aria-label": "your file, in Python" }),
      EditorView.updateListener.of((update) => update.docChanged && onChange(update.state.doc.toString())),
    ],
  });
  return {
    get text() {
      return view.state.doc.toString();
    },
    set text(text) {
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } });
    },
    markLine(line) {
      view.dispatch({ effects: setWrong.of(line) });
      if (line !== null && line <= view.state.doc.lines) {
        view.dispatch({ effects: EditorView.scrollIntoView(view.state.doc.line(line).from, { y: "center" }) });
      }
    },
  };
}
