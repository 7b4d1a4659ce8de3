//! Reads error enums out of their source, so that the page lists every variant, also one that nobody wrote an example for.

/// A variant of an error enum.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Variant {
    pub(super) name: String,
    /// Its documentation.
    pub(super) meaning: String,
    /// It only passes on another error, which is listed with its own enum.
    pub(super) is_transparent: bool,
}

/// The variants of `pub enum name` in `source`, which is formatted by rustfmt.
pub(super) fn variants(source: &str, name: &str) -> Vec<Variant> {
    let head = format!("pub enum {name} {{");
    let body = source.lines().skip_while(|line| *line != head).skip(1).take_while(|line| *line != "}");
    let (mut found, mut meaning, mut attribute) = (Vec::new(), Vec::new(), String::new());
    let mut in_attribute = false;
    for line in body {
        let Some(text) = line.strip_prefix("    ") else { continue };
        if let Some(text) = text.strip_prefix("/// ") {
            meaning.push(text);
        } else if in_attribute || text.starts_with("#[error(") {
            attribute += text;
            attribute.push('\n');
            in_attribute = !text.ends_with(")]");
        } else if text.starts_with(|c: char| c.is_ascii_uppercase()) {
            let name = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned();
            let is_transparent = attribute.contains("error(transparent)");
            found.push(Variant { name, meaning: meaning.join(" "), is_transparent });
            meaning.clear();
            attribute.clear();
        }
    }
    assert!(!found.is_empty(), "`{head}` is not found any more");
    found
}

/// The first string literal in `text` as a program sees it, and what follows it.
pub(super) fn literal(text: &str) -> Option<(String, &str)> {
    let start = text.find('"')? + 1;
    let mut value = String::new();
    let mut chars = text[start..].char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[start + at + 1..])),
            '\\' => match chars.next()?.1 {
                '\n' => while chars.next_if(|(_, c)| c.is_whitespace()).is_some() {},
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            c => value.push(c),
        }
    }
    None
}

/// Problems and remedies that `source` writes at `Error::Misuse { .. }`, `Error::Parameter { .. }` and `misuse(..)`.
pub(super) fn remedies(source: &str) -> Vec<[String; 2]> {
    let source = source.split("#[cfg(test)]").next().unwrap_or_default();
    let marks = ["Error::Misuse {", "Error::Parameter {", ".misuse("];
    let mut starts: Vec<_> = marks.iter().flat_map(|mark| source.match_indices(mark)).map(|(at, _)| at).collect();
    starts.sort_unstable();
    let pair = |at: usize| {
        let text = &source[at..];
        let (problem, rest) = literal(text)?;
        let before = &text[..text.len() - rest.len()];
        let (remedy, _) = literal(rest)?;
        // What is put together elsewhere, and what is our own mistake, has no text here.
        let is_here = !before.contains("problem,") && !before.contains(';') && !remedy.contains("report this");
        let named = problem.replace(":?}", "}").replace("{}", "{...}").replace('{', "‹").replace('}', "›");
        is_here.then_some([named, remedy])
    };
    starts.into_iter().filter_map(pair).collect()
}

#[test]
fn variants_and_refusals_are_read_as_they_are_written() {
    let source = "\
pub enum Wrong {
    /// A file
    /// is not there.
    #[error(
        \"{}: {bytes:?} of {{ all }} \\
         are {}\",
        path.display(), human_bytes(*free_bytes)
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// Another one.
    #[error(transparent)]
    Other(Box<Other>),
}
";
    let variant = |name: &str, meaning: &str, is_transparent| Variant {
        name: name.into(),
        meaning: meaning.into(),
        is_transparent,
    };
    let expected = [variant("Missing", "A file is not there.", false), variant("Other", "Another one.", true)];
    assert_eq!(variants(source, "Wrong"), expected);
    let source = "Err(Error::Misuse { problem: format!(\"{} is {x:?}\", y), remedy: \"leave \\\n    it\" })";
    assert_eq!(remedies(source), [["‹...› is ‹x›".to_owned(), "leave it".to_owned()]]);
}
