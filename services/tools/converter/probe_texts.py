"""Texts that pre-tokenizers split differently; equal ids for all of them mean the same split."""

PROBES = (
    "",
    " ",
    "Hello, world! It's we're they'LL I'VE  don't 'S x'sy",
    "a  b   c\t\td \n \n  e\n\n\n   f\r\n\r\ng   ",
    "1 12 123 1234 12345678 3.14 1,000,000 0xFF a1b22c333 ٣٤٥ １２３４５ ½ Ⅷ",
    "def f(x):\n    return x**2 + 1  # note\n\n\tclass A: pass\n",
    "HelloWorld helloWORLD XMLHttpRequest Ünïcödé ÀÉÎ ǅ ſ ʰ ª",
    "~ ~~ a~b !~ $100 €5 ^_^ `code` a|b <tag> (a.b,c!d?e) …。，、।۔،",
    "日本語、漢字かな。カタカナ ｶﾅ 中文没有空格！ 한국어 ㄱㄴ 你好world混合123",
    "Привет, мир! नमस्ते दुनिया বাংলা ภาษาไทย العربية، نص؟ שָׁלוֹם",
    "e\u0301 a\u0308o\u0308 \u0301x 👍🏽 👩‍👩‍👧 🇩🇪 ❤️ \u00a0nb\u2003em\u3000wide\u200bz\ufeff \u2028l\x85n",
    "\x01\x08\x0b\x1f\x7f a\x04b \x04! 𝔘𝔫𝔦 𐍈 𠀀 \U000f0000 “q” — – ‰ • x²+y³ ∑∞ ≤ → ±",
    "https://example.com/a/b?c=d&e=f#g user@host.org No.1 v1.2.3-rc4 ____ ----- ====",
)
